"""Entry point of `python -m dovetail` and of the console script `dovetail`."""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from dovetail.core.compose.cli import main as run
    except KeyboardInterrupt:  # Ctrl-C while the modules are imported
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
