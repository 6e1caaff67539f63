"""`python -m loadgen`."""

from loadgen.main import main

if __name__ == "__main__":
    main()
