"""The command `surefeat`, also as `python -m surefeat`: Ctrl-C is a line, whenever it comes."""

import os
import sys
from contextlib import suppress


def main() -> None:
    try:
        from surefeat.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("surefeat: stopped\n")
    except SystemExit as end:
        if end.code != 130:
            raise
    with suppress(OSError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)  # Python would wait for threads that still decode a large photo


if __name__ == "__main__":
    main()
