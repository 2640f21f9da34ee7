"""ProcessRPC: notifications and calls between the event loops of two processes, over a Channel."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from dovetail.core.errors import DovetailError, EngineDown, RequestError
from dovetail.core.parallel.channel import Channel, ChannelClosed

log = logging.getLogger(__name__)

_UNAVAILABLE = 503


class ProcessRPC:
    """Connection to another process. Used only in the event loop, except `listen`."""

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        self._channel, self._loop = channel, loop
        self.handlers: dict[str, Callable[..., Any]] = {}
        """Message name -> function of its arguments. Messages are handled in the order of arrival. For a call, the
        returned value is the answer; an awaitable is awaited first."""
        self.exit_reason = ""
        """Error that the other process reported before it ended. Written by the thread in `listen`."""
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Future[None]] = set()

    def notify(self, op: str, **arguments: Any) -> None:
        """Send a message without an answer. It is dropped if the other process has ended."""
        self._send({"op": op, "arguments": arguments})

    async def call(self, op: str, **arguments: Any) -> Any:
        """Return the answer of the other process. Raises its RequestError; EngineDown, also if it has ended."""
        id = next(self._ids)
        answer = self._pending[id] = self._loop.create_future()
        self._send({"op": op, "arguments": arguments, "ask": id})
        try:
            return await answer
        finally:
            self._pending.pop(id, None)

    def listen(self) -> None:
        """Receive messages until the other process ends. Runs in a separate thread."""
        try:
            self._listen()
        except RuntimeError:
            log.debug("the event loop is closed: a message of the other process is dropped")

    def _listen(self) -> None:
        try:
            while True:
                message, _ = self._channel.recv()
                if message["op"] == "error":
                    self.exit_reason = message["text"]
                    if message["traceback"]:
                        log.error("another process failed: %s", message["traceback"])
                    continue
                self._loop.call_soon_threadsafe(self._handle, message)
        except ChannelClosed:
            self._loop.call_soon_threadsafe(self._fail_pending)

    # In the event loop.

    def _handle(self, message: dict[str, Any]) -> None:
        call = message.get("ask")
        if message["op"] == "answer":
            self._resolve(message)
        elif call is None:
            self.handlers[message["op"]](**message["arguments"])
        else:
            self._execute(call, self.handlers[message["op"]], message["arguments"])

    def _resolve(self, message: dict[str, Any]) -> None:
        answer = self._pending.pop(message["ask"], None)
        if answer is None or answer.done():
            return
        if not message["error"]:
            answer.set_result(message["value"])
        elif message["status"] == _UNAVAILABLE:
            answer.set_exception(EngineDown(message["error"]))
        elif message["status"] >= 500:
            answer.set_exception(DovetailError(message["error"]))
        else:
            answer.set_exception(RequestError(message["error"], status=message["status"]))

    def _execute(self, call: int, handler: Callable[..., Any], arguments: dict[str, Any]) -> None:
        try:
            value = handler(**arguments)
        except Exception as error:
            self._refuse(call, error)
            return
        if isinstance(value, Awaitable):
            task = asyncio.ensure_future(self._answer_later(call, value))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        else:
            self._answer(call, value)

    async def _answer_later(self, call: int, value: Awaitable[Any]) -> None:
        try:
            self._answer(call, await value)
        except Exception as error:
            self._refuse(call, error)

    def _answer(self, call: int, value: Any) -> None:
        self._send({"op": "answer", "ask": call, "value": value, "error": ""})

    def _refuse(self, call: int, error: Exception) -> None:
        if isinstance(error, EngineDown):
            status = _UNAVAILABLE
        elif isinstance(error, RequestError):
            status = error.status
        else:
            log.error("an answer to another process failed", exc_info=error)
            status = 500
        self._send({"op": "answer", "ask": call, "value": None, "error": str(error) or repr(error), "status": status})

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(message)
        except (ChannelClosed, OSError):
            self._fail_pending()

    def _fail_pending(self) -> None:
        pending, self._pending = self._pending, {}
        for answer in pending.values():
            if not answer.done():
                answer.set_exception(EngineDown("the process that was called has ended"))
