"""`python -m surefeat`."""

from surefeat.cli import main

if __name__ == "__main__":
    main()
