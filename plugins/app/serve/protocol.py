"""uvicorn's HTTP/1.1 protocol with limits on what a client sends besides a body that is read: the head, the trailers,
and the rest of a body whose answer was sent early. Each has a limit on its size and on its time.

Otherwise a client that never ends them would occupy memory and a connection indefinitely."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dovetail.plugins.app.serve.errors import FieldError, body_bytes

log = logging.getLogger(__name__)

_HEAD_BYTES = 64 << 10
_STEP = 16 << 10
"""Bytes that are parsed at once, and so the precision of the limits."""


_DESCRIPTORS_LEFT = 64
_WARNING_SECONDS = 60.0
_warned_at = -math.inf


def _warn_of_descriptors(descriptor: int) -> None:
    """Log a warning, at most once a minute, if this descriptor is among the last that the process may open. Descriptors
    are assigned from the lowest, and uvloop drops connections silently once there are none."""
    import resource  # Not on Windows, where app=serve reports that it cannot run.

    global _warned_at
    limit, now = resource.getrlimit(resource.RLIMIT_NOFILE)[0], time.monotonic()
    if limit == resource.RLIM_INFINITY or descriptor < limit - min(_DESCRIPTORS_LEFT, limit // 8):
        return
    if now - _warned_at >= _WARNING_SECONDS:
        _warned_at = now
        log.warning(
            "%d of %d file descriptors are in use; further connections will be dropped: raise the limit (ulimit -n, "
            "LimitNOFILE of systemd)", descriptor + 1, limit,
        )  # fmt: skip


class BoundedProtocol(HttpToolsProtocol):
    seconds: ClassVar[float]
    """Time limit for a head, from the start of the connection or from the head's first byte, and for the rest of a body
    after its answer."""
    rest_bytes: ClassVar[int]
    """Size limit of the rest of a body after its answer."""
    _in_head = True
    _taken = 0
    """Bytes of the head or of the trailers so far."""
    _rest = 0
    """Bytes of the body that arrived after its answer."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        _warn_of_descriptors(transport.get_extra_info("socket").fileno())

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._timer is None:
            self._wait()
        for start in range(0, len(data), _STEP):
            piece = data[start : start + _STEP]
            self._taken += len(piece)
            super().data_received(piece)
            if self._taken > _HEAD_BYTES:
                self._refuse(431, f"the request's head or its trailers are longer than {_HEAD_BYTES} bytes")
            if self.transport.is_closing():
                return

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are not headers: a proxy in front has not seen them.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._taken, self._rest = False, 0, 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._taken = 0
        super().on_body(body)
        if self.cycle.response_complete:
            self._rest += len(body)
            if self._rest > self.rest_bytes:
                self.transport.close()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._taken = True, 0
        if self.cycle.response_complete:
            self._stop_waiting()
            # The rest of the body has stopped uvicorn's timer.
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head and self.cycle.response_complete and self._timer is None:
            self._wait()

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self.seconds, self._late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if not self._in_head:
            self.transport.close()
        elif self.cycle is not None and not self.cycle.response_complete:
            # The head of the next request has time until the answer ends.
            self._wait()
        else:
            self._refuse(408, f"the request's head took more than {self.seconds:g} s (serve.receive_timeout)")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Close the connection; first send an error if no answer is in progress."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if not self.pipeline and not (answering and self.cycle.response_started):
            body = body_bytes(FieldError(message, status=status))
            head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        if answering:
            # Nothing may follow the error.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def bounded(seconds: float, rest_bytes: int) -> type[BoundedProtocol]:
    return type("BoundedProtocol", (BoundedProtocol,), {"seconds": seconds, "rest_bytes": rest_bytes})
