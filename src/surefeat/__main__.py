"""`python -m surefeat`."""

from surefeat.cli.main import main

if __name__ == "__main__":
    main()
