"""Peer: the event loops of two processes tell and ask each other things, over a Channel."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from dovetail.core.errors import EngineDown, RequestError
from dovetail.core.parallel.channel import Channel, ChannelClosed

log = logging.getLogger(__name__)

_UNAVAILABLE = 503


class Peer:
    """The other process. Belongs to the event loop, but for `listen`."""

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        self._channel, self._loop = channel, loop
        self.handlers: dict[str, Callable[..., Any]] = {}
        """What is done with a message of that name, with its arguments, in the order in which they came. Where it was
        asked, what it returns is the answer, or what comes of it where that can be awaited."""
        self.last_words = ""
        """Why it ends. Written by the thread that listens."""
        self._ids = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Future[None]] = set()

    def tell(self, op: str, **arguments: Any) -> None:
        """To one that is gone nothing is said: its end is noticed elsewhere."""
        self._send({"op": op, "arguments": arguments})

    async def ask(self, op: str, **arguments: Any) -> Any:
        """Its answer. Raises RequestError, and EngineDown, also where it is gone."""
        id = next(self._ids)
        answer = self._asked[id] = self._loop.create_future()
        self._send({"op": op, "arguments": arguments, "ask": id})
        try:
            return await answer
        finally:
            self._asked.pop(id, None)

    def listen(self) -> None:
        """Until it is gone; in a thread."""
        try:
            self._listen()
        except RuntimeError:
            log.debug("the event loop is closed: the other process spoke too late")

    def _listen(self) -> None:
        try:
            while True:
                message, _ = self._channel.recv()
                if message["op"] == "error":
                    self.last_words = message["text"]
                    continue
                self._loop.call_soon_threadsafe(self._take, message)
        except ChannelClosed:
            self._loop.call_soon_threadsafe(self._gone)

    # In the event loop.

    def _take(self, message: dict[str, Any]) -> None:
        asked = message.get("ask")
        if message["op"] == "answer":
            self._answered(message)
        elif asked is None:
            self.handlers[message["op"]](**message["arguments"])
        else:
            self._do(asked, self.handlers[message["op"]], message["arguments"])

    def _answered(self, message: dict[str, Any]) -> None:
        answer = self._asked.pop(message["ask"], None)
        if answer is None or answer.done():
            return
        if not message["error"]:
            answer.set_result(message["value"])
        elif message["status"] == _UNAVAILABLE:
            answer.set_exception(EngineDown(message["error"]))
        else:
            answer.set_exception(RequestError(message["error"], status=message["status"]))

    def _do(self, asked: int, handler: Callable[..., Any], arguments: dict[str, Any]) -> None:
        try:
            value = handler(**arguments)
        except Exception as error:
            self._refuse(asked, error)
            return
        if isinstance(value, Awaitable):
            task = asyncio.ensure_future(self._answer_later(asked, value))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        else:
            self._answer(asked, value)

    async def _answer_later(self, asked: int, value: Awaitable[Any]) -> None:
        try:
            self._answer(asked, await value)
        except Exception as error:
            self._refuse(asked, error)

    def _answer(self, asked: int, value: Any) -> None:
        self._send({"op": "answer", "ask": asked, "value": value, "error": ""})

    def _refuse(self, asked: int, error: Exception) -> None:
        if isinstance(error, EngineDown):
            status = _UNAVAILABLE
        elif isinstance(error, RequestError):
            status = error.status
        else:
            log.error("an answer to another process failed", exc_info=error)
            status = 500
        self._send({"op": "answer", "ask": asked, "value": None, "error": str(error) or repr(error), "status": status})

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(message)
        except (ChannelClosed, OSError):
            self._gone()

    def _gone(self) -> None:
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(EngineDown("the process that was asked is gone"))
