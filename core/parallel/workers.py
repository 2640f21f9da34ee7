"""Rank 0's view of the worker processes, which it starts, watches and ends together. One thread starts the processes,
receives their messages and watches them. It lives as long as they do, because Linux ends a child together with the
*thread* that started it. When a process dies, the thread determines which one was first, reports it and ends the
others."""

from __future__ import annotations

import atexit
import faulthandler
import logging
import math
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
from dovetail.core.parallel.failure import RankError, RankFailure, StartHung, describe_exit, first_cause
from dovetail.core.parallel.process import LAST_LOOK_SECONDS, SHOW_STACKS, start_process

log = logging.getLogger(__name__)

_GATHER_SECONDS = 0.3
"""How long to wait for an earlier failure after the first one was detected."""
_ABORT_SECONDS = 0.2
"""Interval between attempts to free rank 0 from a call that waits for a dead rank."""
_JOIN_SECONDS = 2.0
_BLAME_SECONDS = 1.5
"""How long to wait, after an error of rank 0, for a message that another rank caused it."""


@dataclass(slots=True)
class _Process:
    """State of one worker. Written by the watching thread."""

    rank: int
    popen: subprocess.Popen[bytes]
    channel: Channel
    phase: str = "starting"
    last_message: float = field(default_factory=time.monotonic)
    """Time of its last message."""
    inbox: dict[str, dict[str, Any]] = field(default_factory=dict)
    """op -> message. Each op is received once."""


class Workers:
    """Ranks 1 .. size-1. Called from one thread unless noted. Every wait raises RankError if a rank has died."""

    def __init__(
        self,
        size: int,
        order: Mapping[str, Any],
        *,
        inherited: Sequence[int],
        on_failure: Callable[[], None],
        on_answer: Callable[[Mapping[str, str]], None] = lambda message: None,
        on_progress: Callable[[], None] = lambda: None,
        start_timeout: float = math.inf,
    ) -> None:
        """Start the processes. `order` is the first message to each; its rank is added. `inherited` are the descriptors
        that they use. `on_failure` is called repeatedly from another thread, to end calls of rank 0 that wait for a
        dead rank. That thread also calls `on_answer` with replies of serving workers and `on_progress` when a loading
        worker makes progress. `start_timeout`: seconds without progress of any rank, rank 0 included (`told`), after
        which loading ranks are ended."""
        self._size, self._order, self._inherited, self._on_failure = size, order, inherited, on_failure
        self._on_answer, self._on_progress = on_answer, on_progress
        self._start_timeout = start_timeout
        self._phase, self._last_progress = "starting", time.monotonic()
        """Phase of rank 0 and the time of its last progress."""
        self._processes: list[_Process] = []
        self._failures: list[RankFailure] = []
        self._failure: RankFailure | None = None
        self._launch_error: BaseException | None = None
        self._acknowledged = self._broken = self._leaving = self._stopping = False
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

    # Called from rank 0's thread.

    def check(self) -> None:
        """Raise RankError if a rank has died."""
        if self._failure is not None:
            self._acknowledged = True
            raise self._failure.error()

    def idle(self, seconds: float) -> None:
        """Sleep while waiting for the workers. Raises RankError if one has died."""
        time.sleep(seconds)
        self.check()

    def told(self, phase: str) -> None:
        """Report progress of rank 0 in loading."""
        self._phase, self._last_progress = f"in phase {phase!r} of loading", time.monotonic()

    def started(self) -> None:
        """End the start-up timeout: every rank has loaded."""
        self._start_timeout = math.inf

    def post(self, message: Mapping[str, Any]) -> None:
        for process in self._processes:
            try:
                process.channel.send(message)
            except ChannelClosed as error:
                self._broken = True
                self._blame(error)
                raise

    def gather(self, op: str) -> list[dict[str, Any]]:
        """Wait for the message `op` of each worker and return the messages by rank."""
        self._phase, self._last_progress = "waiting for the other ranks", time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or all(op in process.inbox for process in self._processes)
            )
        self.check()
        return [process.inbox[op] for process in self._processes]

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Context of rank 0's work: an error caused by another rank's death becomes that rank's RankError."""
        self.check()
        try:
            yield
            self.check()
        except BaseException as error:
            self._broken = True
            # A DovetailError is meant for the user and never the effect of a closed connection.
            if self._processes and isinstance(error, Exception) and not isinstance(error, DovetailError):
                self._blame(error)
            raise

    def _blame(self, error: Exception) -> None:
        """Raise RankError instead of `error` if a rank has died silently or failed earlier."""
        now = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, _BLAME_SECONDS)
        self._acknowledged = True
        failure = self._failure
        if failure is not None and (failure.silent or failure.at <= now):
            raised = failure.error()
            raise raised from raised.__cause__ or error
        for process in self._processes:
            if how := _stopped(process.popen.pid):
                raise RankError(process.rank, f"does not answer{how}, while {process.phase}") from error

    @property
    def broken(self) -> bool:
        """Whether the ranks may be out of step, so that they cannot shut down in order."""
        return self._broken or self._failure is not None

    def interrupt(self) -> None:
        """Kill the workers, and so end a call of rank 0 that waits for one. Callable from any thread."""
        if self.broken or not self._processes:
            return
        rank, how = next(((p.rank, how) for p in self._processes if (how := _stopped(p.popen.pid))), (0, ""))
        cause = f"had not ended its step when it was interrupted{how}"
        # The interrupted call may end with Ctrl-C, which has no room for the cause.
        log.error("rank %d %s; every rank stops", rank, cause)
        self._failures.append(RankFailure(rank, time.monotonic(), cause, silent=True))
        _kill(self._processes)

    def dismiss(self) -> None:
        """Expect the workers to end from now on: the end of one is no longer a failure."""
        self._leaving = True

    def stop(self, grace: float) -> None:
        """End the workers: wait `grace` seconds for the requested shutdown, then kill them. Idempotent."""
        self._acknowledged = self._stopping = True
        deadline = time.monotonic() + (0.0 if self.broken else grace)
        for process in self._processes:
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.info("rank %d did not end within %g s (%s) and is killed", process.rank, grace, process.phase)
        _kill(self._processes)
        # If a worker's child process kept its socket open, the thread would wait for that child.
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
            # Without this thread no death would be detected, so treat this as one.
            cause = f"cannot watch the others any more: {error!r}"
            self._failures.append(RankFailure(0, time.monotonic(), cause, silent=True))
            self._give_up()
        for process in self._processes:
            process.popen.wait()
            process.channel.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.channel, selectors.EVENT_READ, process)
            # Count only time in which this thread was waiting: all processes may have been stopped and continued.
            silent = 0.0
            while selector.get_map() and not self._failures:
                progress, limit = self._last_progress, self._start_timeout
                tick = min(1.0, limit / 4)
                received = self._listen(selector, tick if limit < math.inf else None)
                silent = 0.0 if received or progress != self._last_progress else silent + tick
                if silent >= self._start_timeout:
                    self._failures.append(self._hung_failure(silent))
            if self._failures and not self._stopping:
                # A death causes errors in other ranks, and theirs may be read first.
                deadline = time.monotonic() + _GATHER_SECONDS
                while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                    self._listen(selector, left)
                self._give_up()
            while selector.get_map():
                self._listen(selector, None)

    def _launch(self, rank: int) -> _Process:
        environment = {"OMP_NUM_THREADS": str(threads_of_a_rank(self._size)), **os.environ}
        popen, channel = start_process("dovetail.core.parallel.worker:main", self._inherited, environment)
        process = _Process(rank, popen, channel)
        process.channel.send({**self._order, "rank": rank})
        return process

    def _hung_failure(self, seconds: float) -> RankFailure:
        """Select the rank that hangs: one that cannot run, or else the one without progress for the longest time."""
        ranks = [(self._last_progress, 0, self._phase, "")]
        ranks += [(p.last_message, p.rank, p.phase, _stuck(p.popen.pid)) for p in self._processes]
        _, rank, phase, stuck = min(ranks, key=lambda one: (not one[3], one))
        others = [f"rank {other} {doing}{how}" for _, other, doing, how in sorted(ranks, key=lambda one: one[1])]
        others.pop(rank)
        # To stderr, where the other ranks write theirs.
        faulthandler.dump_traceback(2)
        for process in self._processes:
            process.popen.send_signal(SHOW_STACKS)
        time.sleep(LAST_LOOK_SECONDS)
        cause = (
            f"hangs while {phase}{stuck}: no rank made progress for {seconds:g} s (engine.start_timeout); "
            f"the others: {', '.join(others)}"
        )
        return RankFailure(rank, time.monotonic(), cause, silent=True, kind=StartHung)

    def _listen(self, selector: selectors.BaseSelector, timeout: float | None) -> bool:
        """Receive pending messages. Returns whether there were any."""
        events = selector.select(timeout)
        for key, _ in events:
            process: _Process = key.data
            try:
                message, _ = process.channel.recv()
            except ChannelClosed:
                selector.unregister(process.channel)
                self._ended(process)
            else:
                self._received(process, message)
            with self._changed:
                self._changed.notify_all()
        return bool(events)

    def _received(self, process: _Process, message: dict[str, Any]) -> None:
        op, process.last_message = message["op"], time.monotonic()
        if op == "error":
            cause = f"failed while {process.phase}: {message['text']}"
            self._failures.append(
                RankFailure(process.rank, message["at"], cause, silent=False, traceback=message["traceback"])
            )
        elif op == "phase":
            process.phase = f"in phase {message['phase']!r} of loading"
            self._on_progress()
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
        expected = self._stopping or (self._leaving and status == 0)
        if not expected and all(failure.rank != process.rank for failure in self._failures):
            cause = describe_exit(status, process.phase)
            self._failures.append(RankFailure(process.rank, time.monotonic(), cause, silent=True))

    def _give_up(self) -> None:
        failure = first_cause(self._failures)
        # Rank 0 raises it as an error, which its caller reports.
        log.info("rank %d %s; every rank stops", failure.rank, failure.cause)
        _kill(self._processes)
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
        # Repeat: rank 0 may be just about to enter the blocking call.
        while not self._acknowledged:
            try:
                self._on_failure()
            except Exception:
                log.exception(
                    "rank %d %s; rank 0 could not be freed from a call that may wait for it",
                    failure.rank,
                    failure.cause,
                )
                return
            time.sleep(_ABORT_SECONDS)


def threads_of_a_rank(size: int) -> int:
    """CPU threads per rank: ranks on a CPU share its cores, and each would otherwise start one thread per core."""
    return max(1, (os.cpu_count() or 1) // size)


_PHASES = {"ready": "waiting to load", "loaded": "waiting for memory sizes", "bound": "serving"}


def _stuck(pid: int) -> str:
    """Describe why a process does not run, as far as Linux reports it."""
    return _stopped(pid) or (", waiting for a disk or a device" if _state(pid) == b"D" else "")


def _stopped(pid: int) -> str:
    return ", stopped by a signal" if _state(pid) == b"T" else ""


def _state(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return b""


def _kill(processes: Sequence[_Process]) -> None:
    for process in processes:
        if process.popen.poll() is None:
            process.popen.send_signal(signal.SIGKILL)
    for process in processes:
        process.popen.wait()
