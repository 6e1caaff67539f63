"""`python -m services.cli` is `headrace`."""

from services.cli.main import main

main()
