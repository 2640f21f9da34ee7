"""The worker processes as rank 0 sees them: started, watched and ended together.

One thread starts them, hears them and watches them. It lives as long as they do, because Linux ends a child with the
*thread* that started it. When one dies, the thread finds out which was first, says so, and ends the others.
"""

from __future__ import annotations

import atexit
import logging
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dovetail.core.errors import DovetailError
from dovetail.core.parallel.channel import Channel, ChannelClosed
from dovetail.core.parallel.failure import Failure, describe_exit, first_cause
from dovetail.core.parallel.process import start_process

log = logging.getLogger(__name__)

_GATHER_SECONDS = 0.3
"""After the first sign of death: how long to listen for an earlier one."""
_ABORT_SECONDS = 0.2
"""Between two attempts to free rank 0 from a call that waits for the dead."""
_JOIN_SECONDS = 2.0
_BLAME_SECONDS = 1.5
"""After an error of rank 0: how long to wait for news that another rank caused it."""


@dataclass(slots=True)
class _Process:
    """Written by the watching thread."""

    rank: int
    popen: subprocess.Popen[bytes]
    channel: Channel
    phase: str = "starting"
    inbox: dict[str, dict[str, Any]] = field(default_factory=dict)
    """op -> the message; each comes once."""


class Workers:
    """Ranks 1 .. size-1. Methods may be called from one thread; every wait raises RankError when a rank has died."""

    def __init__(
        self,
        size: int,
        order: Mapping[str, Any],
        *,
        inherited: Sequence[int],
        on_failure: Callable[[], None],
        on_answer: Callable[[Mapping[str, str]], None] = lambda message: None,
    ) -> None:
        """`order` is the first message to each, to which its rank is added. `inherited` are the descriptors they use.
        `on_failure` is called from another thread, several times, to end calls of rank 0 that wait for a dead rank.
        `on_answer` is called there with what a serving worker answers."""
        self._size, self._order, self._inherited, self._on_failure = size, order, inherited, on_failure
        self._on_answer = on_answer
        self._processes: list[_Process] = []
        self._failures: list[Failure] = []
        self._failure: Failure | None = None
        self._launch_error: BaseException | None = None
        self._acknowledged = self._broken = self._stopping = False
        self._changed = threading.Condition()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dovetail-workers", daemon=True)
        self._thread.start()
        atexit.register(self.stop, 0.0)
        self._started.wait()
        if self._launch_error is not None:
            raise self._launch_error

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.popen.pid for process in self._processes)

    # For the thread of rank 0.

    def check(self) -> None:
        """Raise if a rank has died."""
        if self._failure is not None:
            self._acknowledged = True
            raise self._failure.error()

    def idle(self, seconds: float) -> None:
        """Sleep while waiting for the workers; raises if one has died."""
        time.sleep(seconds)
        self.check()

    def post(self, message: Mapping[str, Any]) -> None:
        for process in self._processes:
            try:
                process.channel.send(message)
            except ChannelClosed as error:
                self._broken = True
                self._blame(error)
                raise

    def gather(self, op: str, timeout: float) -> list[dict[str, Any]]:
        """Each worker's message `op`, by rank."""
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._failure is not None or all(op in process.inbox for process in self._processes), timeout
            )
        self.check()
        if not arrived:
            late = [f"rank {p.rank} ({p.phase})" for p in self._processes if op not in p.inbox]
            raise TimeoutError(f"after {timeout:g} s there is no word {op!r} from {', '.join(late)}")
        return [process.inbox[op] for process in self._processes]

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Around work of rank 0 itself: an error that another rank's death caused becomes that rank's RankError."""
        self.check()
        try:
            yield
            self.check()
        except BaseException as error:
            self._broken = True
            # Errors that are meant for the user are not what a closed connection looks like.
            if self._processes and isinstance(error, Exception) and not isinstance(error, DovetailError):
                self._blame(error)
            raise

    def _blame(self, error: Exception) -> None:
        """Raise RankError in place of `error` if a rank turns out to have died silently, or to have failed earlier."""
        now = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, _BLAME_SECONDS)
        self._acknowledged = True
        failure = self._failure
        if failure is not None and (failure.silent or failure.at <= now):
            raise failure.error() from error

    @property
    def broken(self) -> bool:
        """Whether the ranks may be out of step, so that they cannot be asked to end by themselves."""
        return self._broken or self._failure is not None

    def stop(self, grace: float) -> None:
        """End them: by themselves within so many seconds, having been told to, else by a signal. Idempotent."""
        self._acknowledged = self._stopping = True
        deadline = time.monotonic() + (0.0 if self.broken else grace)
        for process in self._processes:
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.info("rank %d did not end within %g s (%s) and is killed", process.rank, grace, process.phase)
        _kill(self._processes)
        # Were a process of a worker's own to keep its socket open, the thread would wait for that.
        self._thread.join(_JOIN_SECONDS)
        atexit.unregister(self.stop)

    # The watching thread.

    def _run(self) -> None:
        try:
            for rank in range(1, self._size):
                self._processes.append(self._launch(rank))
        except BaseException as error:
            self._launch_error = error
            _kill(self._processes)
            return
        finally:
            self._started.set()
        try:
            self._watch()
        except Exception as error:
            # Without this thread nobody would notice a death: that is one too.
            cause = f"cannot watch the others any more: {error!r}"
            self._failures.append(Failure(0, time.monotonic(), cause, silent=True))
            self._give_up()
        for process in self._processes:
            process.popen.wait()
            process.channel.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.channel, selectors.EVENT_READ, process)
            while selector.get_map() and not self._failures:
                self._listen(selector, None)
            if self._failures and not self._stopping:
                # Whoever died takes others along, and their complaint may be read before its own.
                deadline = time.monotonic() + _GATHER_SECONDS
                while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                    self._listen(selector, left)
                self._give_up()
            while selector.get_map():
                self._listen(selector, None)

    def _launch(self, rank: int) -> _Process:
        environment = dict(os.environ)
        # Ranks on a CPU share its cores; each would otherwise start a thread for every one of them.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self._size)))
        popen, channel = start_process("dovetail.core.parallel.worker:main", self._inherited, environment)
        process = _Process(rank, popen, channel)
        process.channel.send({**self._order, "rank": rank})
        return process

    def _listen(self, selector: selectors.BaseSelector, timeout: float | None) -> None:
        for key, _ in selector.select(timeout):
            process: _Process = key.data
            try:
                message, _ = process.channel.recv()
            except ChannelClosed:
                selector.unregister(process.channel)
                self._ended(process)
            else:
                self._heard(process, message)
            with self._changed:
                self._changed.notify_all()

    def _heard(self, process: _Process, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "error":
            cause = f"failed while {process.phase}: {message['text']}"
            self._failures.append(Failure(process.rank, message["at"], cause, silent=False))
        elif op == "phase":
            process.phase = f"in phase {message['phase']!r} of loading"
        elif op == "answer":
            self._on_answer(message)
        else:
            process.phase = _PHASES[op]
            process.inbox[op] = message

    def _ended(self, process: _Process) -> None:
        try:
            status = process.popen.wait(1.0)
        except subprocess.TimeoutExpired:
            process.popen.kill()
            status = process.popen.wait()
        if not self._stopping and all(failure.rank != process.rank for failure in self._failures):
            cause = describe_exit(status, process.phase)
            self._failures.append(Failure(process.rank, time.monotonic(), cause, silent=True))

    def _give_up(self) -> None:
        failure = first_cause(self._failures)
        log.error("rank %d %s; every rank stops", failure.rank, failure.cause)
        _kill(self._processes)
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
        # Rank 0 may be about to enter the very call that has to end.
        while not self._acknowledged:
            try:
                self._on_failure()
            except Exception:
                log.exception("rank 0 could not be freed from a call that may wait for rank %d", failure.rank)
                return
            time.sleep(_ABORT_SECONDS)


_PHASES = {"ready": "waiting to load", "loaded": "waiting for memory sizes", "bound": "serving"}


def _kill(processes: Sequence[_Process]) -> None:
    for process in processes:
        if process.popen.poll() is None:
            process.popen.send_signal(signal.SIGKILL)
    for process in processes:
        process.popen.wait()
