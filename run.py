"""Compose a run from its parts, validate it and run it: `python run.py --help`."""

import sys

from dovetail.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
