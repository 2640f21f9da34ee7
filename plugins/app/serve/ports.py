"""Sockets for the port of a server with one or several processes."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from dovetail.core.errors import ConfigError
from dovetail.plugins.app.serve.config import ServeConfig


def bind(config: ServeConfig) -> socket.socket:
    """Return a socket that is bound but not yet listening. Raises ConfigError if the port is in use."""
    try:
        family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise ConfigError(f"serve.host={config.host} serve.port={config.port}: cannot listen there ({error})") from None
    if config.processes > 1:
        # Set after bind, which thereby fails if another server uses the port; set before, two servers would share it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return sock


def bind_shared(address: Sequence[str | int]) -> socket.socket:
    """Return another socket of the same server at an address bound by `bind`."""
    sock = socket.socket(socket.AF_INET if len(address) == 2 else socket.AF_INET6)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        sock.setsockopt(socket.SOL_SOCKET, option, 1)
    sock.bind(tuple(address))
    return sock
