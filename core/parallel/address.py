"""Addresses at which processes of this machine connect."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

_HOST = "127.0.0.1"


@contextmanager
def free_address() -> Iterator[str]:
    """Reserve an address for the process that others connect to, since engines may start together and ranks take
    seconds to connect."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((_HOST, 0))
        yield f"{_HOST}:{reserved.getsockname()[1]}"
