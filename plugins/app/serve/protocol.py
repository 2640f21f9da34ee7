"""uvicorn's HTTP/1.1 protocol with limits on the size of a request's head and on the time until it is complete.

Otherwise a client that never ends its head would occupy memory and a connection indefinitely."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dovetail.plugins.app.serve.errors import FieldError, body_bytes

_HEAD_BYTES = 64 << 10


class BoundedProtocol(HttpToolsProtocol):
    seconds: ClassVar[float]
    """Time limit for a head, from the start of the connection or from the head's first byte."""
    _in_head = True
    _taken = 0
    """Bytes of the head so far."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._taken += len(data)
            if self._timer is None:
                self._wait()
        super().data_received(data)
        if self._in_head and self._taken > _HEAD_BYTES:
            self._refuse(431, f"the request's head is longer than {_HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._taken = True, 0

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self.seconds, self._late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._refuse(408, f"the request's head took more than {self.seconds:g} s (serve.receive_timeout)")

    def _refuse(self, status: int, message: str) -> None:
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = body_bytes(FieldError(message, status=status))
            head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()


def bounded(seconds: float) -> type[BoundedProtocol]:
    return type("BoundedProtocol", (BoundedProtocol,), {"seconds": seconds})
