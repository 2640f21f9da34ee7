"""Text on which the bundled model was not trained: modules of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from dovetail.core.errors import ConfigError

HELD_OUT = (
    "bz2.py", "contextlib.py", "ctypes/util.py", "filecmp.py", "functools.py", "multiprocessing/resource_tracker.py",
    "multiprocessing/synchronize.py", "unittest/suite.py", "xml/dom/xmlbuilder.py", "zipimport.py",
    "zoneinfo/_tzpath.py",
)  # fmt: skip
"""Modules of the held-out set of examples/train_tiny, without tests, which not every installation has. Their sources
depend on the Python version."""


def held_out_texts(what: str) -> list[str]:
    """Return the texts. Raises ConfigError, which begins with `what`, if they cannot be read."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [read_text(folder / name, what) for name in HELD_OUT]


def read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} cannot be read ({error})") from None
