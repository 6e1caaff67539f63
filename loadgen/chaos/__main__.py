"""`python -m loadgen.chaos`."""

from loadgen.chaos.main import app

app(prog_name="loadgen.chaos")
