"""HTTP layer below the endpoints: limits, API keys, and streams that end when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.core.errors import EngineDown
from dovetail.plugins.app.serve import exchange as exchanges
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.errors import FieldError, body_of, respond
from dovetail.plugins.app.serve.exchange import Exchange
from dovetail.plugins.app.serve.hosts import Hosts
from dovetail.plugins.app.serve.keys import Keys

log = logging.getLogger(__name__)
_T = TypeVar("_T")

PROBES = frozenset({"/health", "/ready"})
"""Paths for which 503 is a normal answer, so their errors are not counted."""
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/metrics", "/openapi.json"})
"""Paths that need no API key, since they reveal nothing about requests."""
CLIENT_DISCONNECTED = 499
"""Status in the log of a request whose client has closed its connection."""


class ClientDisconnected(Exception):
    """The client has closed its connection."""


class Gate:
    """Middleware that refuses requests without an accepted key, for other hosts, and bodies that are too long, too slow
    or compressed. It records every exchange."""

    def __init__(self, app: ASGIApp, config: ServeConfig, keys: Keys, on_status: Callable[[int], None]) -> None:
        """`on_status` gets the status of every non-probe answer."""
        self._app, self._keys, self._on_status = app, keys, on_status
        self._hosts = Hosts(config, keys=bool(keys))
        self._limit, self._seconds, self._log = config.max_body_bytes, config.receive_timeout, config.log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        exchange = exchanges.begin(scope, headers.get(b"x-request-id", b""))

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", exchange.id.encode())]}
            await send(message)

        try:
            if (error := self._refusal(scope, headers, exchange)) is not None:
                await respond(error)(scope, receive, noting)
            else:
                await self._bounded(scope, receive, noting)
        finally:
            if scope["path"] not in PROBES:
                self._on_status(exchange.status)
            if self._log:
                exchange.log()

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes], exchange: Exchange) -> FieldError | None:
        """Return why a request is refused before its body is read; None = it is not."""
        if not self._hosts.accept(host := headers.get(b"host", b"").decode("latin-1")):
            message = f"this server does not answer to the host {host!r}: add its name to serve.allowed_hosts"
            return FieldError(message, status=403, code="host_not_allowed")
        path: str = scope["path"]
        if self._keys and path not in OPEN_PATHS and not path.startswith("/static/") and scope["method"] != "OPTIONS":
            scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
            name = self._keys.name(key.strip()) if scheme.lower() == "bearer" else None
            if name is None:
                message = "no valid API key: send `Authorization: Bearer KEY`"
                return FieldError(message, status=401, code="invalid_api_key")
            exchange.key = name
        if (coding := headers.get(b"content-encoding", b"identity").decode("latin-1").lower()) != "identity":
            return FieldError(f"content-encoding: {coding!r} is not supported; send the body uncompressed", status=415)
        length = headers.get(b"content-length", b"0")
        return self._too_long() if length.isdigit() and int(length) > self._limit else None

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Enforce the limits while the body is received; a chunked body does not declare its length."""
        taken, whole, started, ended = 0, False, False, False
        deadline = asyncio.get_running_loop().time() + self._seconds

        async def counted() -> Message:
            nonlocal taken, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                late = f"the body took more than {self._seconds:g} s (serve.receive_timeout)"
                raise _Refused(FieldError(late, status=408)) from None
            whole = not message.get("more_body", False)
            taken += len(message.get("body", b""))
            if taken > self._limit:
                raise _Refused(self._too_long())
            return message

        async def watched(message: Message) -> None:
            nonlocal started, ended
            started = True
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, counted, watched)
        except _Refused as refused:
            if not started:
                response = respond(refused.error)
                if refused.error.status == 408:
                    # A slow body is not awaited, so its connection cannot be reused.
                    response.headers["connection"] = "close"
                await response(scope, receive, send)
        except Exception:
            if not ended:
                raise
            # The 500 was already sent. Re-raising would also make uvicorn close the connection.
            exchange = exchanges.of(scope)
            log.exception("%s %s failed (%s)", exchange.method, exchange.path, exchange.id)

    def _too_long(self) -> FieldError:
        return FieldError(f"the body is longer than {self._limit} bytes (serve.max_body_bytes)", status=413)


class _Refused(BaseException):
    """Refusal raised while the body is read. A BaseException, since FastAPI would answer an Exception itself."""

    def __init__(self, error: FieldError) -> None:
        self.error = error


def json_response(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def while_connected(receive: Receive, work: Awaitable[_T]) -> _T:
    """Return the result of `work`. If the client disconnects, cancel it and raise ClientDisconnected."""
    task: asyncio.Future[_T] = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait((task, listener), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for future in (task, listener):
            future.cancel()
        if not task.done():
            await asyncio.wait((task,))


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
        "description": "The answer or a stream of events.",
    }
}
"""OpenAPI entry of endpoints that answer with an EventStream if the request sets `stream`."""


class EventStream(Response):
    """Server-sent events. For a client that reads slowly, the source of `pieces` merges the output that accumulates."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, pieces: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        """`first` was taken from `pieces` before the status is sent, so that a refused request gets an error status."""
        self.status_code = 200
        self.background = None
        self._first, self._pieces, self._on_end = first, pieces, on_end
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchanges.of(scope)
        try:
            await while_connected(receive, self._pump(send, exchange))
        except ClientDisconnected:
            exchange.status = CLIENT_DISCONNECTED
        finally:
            self._on_end()

    async def _pump(self, send: Send, exchange: Exchange) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as error:
            # The status was already sent, so the error becomes an event.
            exchange.status, body, _ = body_of(error)
            if exchange.status == 500 and not isinstance(error, EngineDown):
                log.exception("a stream failed (%s)", exchange.id)
            await send({"type": "http.response.body", "body": event(body), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"


def event(data: object, name: str | None = None) -> bytes:
    head = b"data: " if name is None else b"event: " + name.encode() + b"\ndata: "
    return head + ENCODER.encode(data) + b"\n\n"
