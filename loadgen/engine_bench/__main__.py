"""`python -m loadgen.engine_bench`."""

import typer

from loadgen.engine_bench.main import main

if __name__ == "__main__":
    typer.run(main)
