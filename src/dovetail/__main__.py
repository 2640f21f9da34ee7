"""`python -m dovetail`, which is also the program `dovetail`."""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from dovetail.core.compose.cli import main as run
    except KeyboardInterrupt:  # imports take a moment
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
