"""Names by which clients may address the server, and the addresses on which it needs API keys."""

from __future__ import annotations

import ipaddress
import re

from dovetail.core.errors import ConfigError
from dovetail.plugins.app.serve.config import ServeConfig

_HEADER = re.compile(r"(?:\[(?P<address>[^]]+)\]|(?P<name>[^:]*))(?::\d*)?")


class Hosts:
    """Names accepted in the header `Host`. Without this check, a web page could rebind its own name to this server's
    address (DNS rebinding) and read answers with the browser of a user who can reach the server."""

    def __init__(self, config: ServeConfig, *, keys: bool) -> None:
        """`keys`: requests need an API key, which such a page does not have."""
        allowed = config.allowed_hosts or (("*",) if keys else ("localhost", config.host.lower()))
        self._any = "*" in allowed
        self._names = {name for name in allowed if not name.startswith("*")}
        self._domains = tuple(name[1:] for name in allowed if name.startswith("*."))

    def accept(self, header: str) -> bool:
        """Whether to answer. An IP address is accepted: a page that rebinds its name sends the name. So is a missing
        header, since browsers always send one."""
        name = _name(header)
        return self._any or not name or name in self._names or name.endswith(self._domains) or _is_address(name)


def _name(header: str) -> str:
    """Return the host without its port, in lower case; a malformed header unchanged."""
    if (found := _HEADER.fullmatch(header)) is None:
        return header
    return (found["address"] or found["name"]).rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def refuse_open(config: ServeConfig, address: str, *, keys: bool) -> None:
    """Raise ConfigError if a server at this IP address would accept requests of others without an API key."""
    if keys or config.open or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return
    raise ConfigError(
        f"serve.host={config.host}: other machines can reach this address and no API key is set. Set keys with "
        "serve.api_key_file or DOVETAIL_API_KEYS, listen on serve.host=127.0.0.1, or accept requests without keys with "
        "serve.open=true"
    )
