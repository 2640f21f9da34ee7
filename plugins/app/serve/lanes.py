"""Threads for work that would block the event loop."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Lane:
    """A queue and its threads. Unlike those of a ThreadPoolExecutor, they do not delay the exit of the process, so a
    call that never returns cannot keep a server from ending."""

    def __init__(self, threads: int, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = threads
        for i in range(threads):
            threading.Thread(target=self._work, name=f"dovetail-{name}-{i}", daemon=True).start()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return function(*args, **kwargs). A call that is cancelled while it waits is not executed."""
        future: Future[T] = Future()
        self._queue.put((future, functools.partial(function, *args, **kwargs)))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del item, future, call

    def close(self) -> None:
        """End each thread after the calls that are queued."""
        for _ in range(self._threads):
            self._queue.put(None)
