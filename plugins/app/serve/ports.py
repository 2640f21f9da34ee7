"""The port that a server listens on, alone or with several processes."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from dovetail.core.errors import ConfigError
from dovetail.plugins.app.serve.config import ServeConfig


def take(config: ServeConfig) -> socket.socket:
    """Bound, not yet listening. Says at once that a port is taken."""
    try:
        family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise ConfigError(f"serve.host={config.host} serve.port={config.port}: cannot listen there ({error})") from None
    if config.processes > 1:
        # Only now that it is this server's alone: otherwise two servers would share a port that both were given.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return sock


def join(address: Sequence[str | int]) -> socket.socket:
    """A socket of this process's own at the address that its server has taken."""
    sock = socket.socket(socket.AF_INET if len(address) == 2 else socket.AF_INET6)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        sock.setsockopt(socket.SOL_SOCKET, option, 1)
    sock.bind(tuple(address))
    return sock
