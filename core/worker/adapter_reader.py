"""Reads adapters on a rank while its steps go on."""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from dovetail.core.errors import RequestError, shown
from dovetail.core.interfaces import Adapters

log = logging.getLogger(__name__)


class AdapterReader:
    """A thread that reads one adapter at a time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "dovetail-adapter")

    def read(self, adapters: Adapters, key: str, folder: Path) -> Future[None]:
        """Read this rank's share of an adapter. The future raises RequestError."""
        return self._pool.submit(_read, adapters, key, folder)

    def close(self) -> None:
        """Cancel what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _read(adapters: Adapters, key: str, folder: Path) -> None:
    try:
        folder = folder.expanduser()
        adapters.read(key, folder)
    except RequestError as error:
        # Clients see the message, and where the folder is concerns the operator alone.
        message = str(error)
        if folder.is_absolute() and folder != Path(folder.anchor):
            message = message.replace(f"{folder}{os.sep}", "").replace(str(folder), "the folder")
        raise RequestError(message, status=error.status) from None
    except Exception as error:  # A folder may hold anything; the error concerns this adapter only.
        log.exception("adapter %s cannot be read from %s", key, shown(folder))
        raise RequestError(f"adapter: it cannot be read ({type(error).__name__}; the log has the reason)") from error
