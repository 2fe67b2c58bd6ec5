"""The command `surefeat`, also as `python -m surefeat`: Ctrl-C is a line even while it loads."""

import sys


def main() -> None:
    try:
        from surefeat.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("surefeat: stopped\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
