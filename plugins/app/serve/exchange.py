"""One request and its answer: the record from which the log line, the metrics of errors and `x-request-id` are made."""

from __future__ import annotations

import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.types import Scope

log = logging.getLogger(__name__)

_GIVEN_ID = re.compile(rb"[\w.:/+=@-]{1,128}", re.ASCII)
_SCOPE_KEY = "dovetail.exchange"


@dataclass(slots=True)
class Exchange:
    """Facts of one request for the operator; never its text."""

    method: str
    path: str
    id: str
    """Value of `x-request-id`."""
    key: str = ""
    """Name of the request's API key; "" = none."""
    status: int = 0
    """HTTP status; of a stream that failed, the status that its error would have had. 0 = no answer."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    began: float = field(default_factory=time.perf_counter)

    def log(self) -> None:
        seconds = time.perf_counter() - self.began
        facts: dict[str, str | int] = {"request_id": self.id}
        if self.key:
            facts["key"] = self.key
        if self.prompt_tokens:
            for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
                facts[name] = getattr(self, name)
        text = " ".join(f"{name}={value}" for name, value in facts.items())
        log.info(
            "%s %s %d %.1f ms %s", self.method, self.path, self.status, seconds * 1e3, text,
            extra={"method": self.method, "path": self.path, "status": self.status, "seconds": seconds, **facts},
        )  # fmt: skip


def begin(scope: Scope, given_id: bytes) -> Exchange:
    """Create the record of a request. `given_id`: the client's `x-request-id`, which is kept if it is well-formed."""
    own = given_id.decode() if _GIVEN_ID.fullmatch(given_id) else f"req_{uuid.uuid4().hex}"
    # A path may contain any character, also a newline.
    scope[_SCOPE_KEY] = exchange = Exchange(scope["method"], quote(scope["path"]), own)
    return exchange


def of(scope: Scope) -> Exchange:
    """Return the record that `begin` created."""
    exchange: Exchange = scope[_SCOPE_KEY]
    return exchange
