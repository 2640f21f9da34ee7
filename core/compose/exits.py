"""os._exit while the code of a package is imported: an error of the package in place of a silent end of the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def no_exit() -> Iterator[None]:
    """Raise SystemExit where this thread calls os._exit inside the block. Other threads and forked processes end as
    they wish. Native code that ends the process is not caught."""
    end, owner = os._exit, (os.getpid(), threading.get_ident())
    inside = True

    def refuse(status: int) -> NoReturn:
        # A package may keep the function, as `from os import _exit` does.
        if inside and owner == (os.getpid(), threading.get_ident()):
            raise SystemExit(f"it called os._exit({status})")
        end(status)

    os._exit = refuse
    try:
        yield
    finally:
        inside = False
        os._exit = end
