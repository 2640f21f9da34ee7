"""Calls into a separate process with limits of time and memory, for code or data that may loop, grow or crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from dovetail.core.errors import DovetailError
from dovetail.core.parallel.channel import Channel, ChannelClosed
from dovetail.core.parallel.failure import describe_exit
from dovetail.core.parallel.process import enter, start_process

START_SECONDS = 120.0
"""Time limit for the process to import its modules."""
_LONGEST_REASON = 500
"""Longest error text in characters. It may quote the data of the call."""


class CallFailed(DovetailError):
    """A call raised an exception, passed a limit or ended the process. The message is the end of a sentence whose
    subject is the call."""


class LimitedProcess:
    """A child process that executes one call at a time. It is killed when a call passes a limit; the next call starts
    it again. Use it in one thread that lives as long as the process, which Linux ends with that thread."""

    def __init__(self, entry: str, *, seconds: float, memory: int) -> None:
        """`entry`: "module:function", a function that calls `answer_calls`. Limits: `seconds` of each call, and bytes
        of `memory` beyond what the process occupies before its first call (enforced on Linux)."""
        self._entry, self._seconds, self._memory = entry, seconds, memory
        self.setup: Mapping[str, Any] = {}
        """Argument of the function `prepare` of `answer_calls`. Replace it between calls; never change it."""
        self._sent: Mapping[str, Any] | None = None
        """The setup that the process has."""
        self._popen: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id; None = it is not running."""
        return None if self._popen is None else self._popen.pid

    def start(self) -> None:
        """Start the process and wait until it accepts calls. No effect if it runs. Raises CallFailed."""
        if self._popen is not None:
            return
        self._sent = None
        self._popen, self._channel = start_process(self._entry)
        try:
            if self._closed:
                raise CallFailed("is not possible any more: the process is closed")
            self._channel.send({"memory": self._memory})
            self._receive(self._channel, START_SECONDS)
        except BaseException as error:
            raise self._failed(error) from None

    def call(self, /, **arguments: Any) -> str:
        """Call the function that `prepare` returned, with arguments and a result that JSON can represent. Raises
        CallFailed."""
        self.start()
        assert self._channel is not None
        try:
            if self._sent is not self.setup:
                self._channel.send({"setup": self.setup})
                self._sent = self.setup
            self._channel.send({"arguments": arguments})
            answer, text = self._receive(self._channel, self._seconds)
        except RecursionError:
            # Raised while the message was encoded, so nothing was sent.
            raise CallFailed("has values that are nested too deeply") from None
        except BaseException as error:
            raise self._failed(error) from None
        if answer["error"]:
            raise CallFailed(answer["error"])
        return text.decode()

    def _receive(self, channel: Channel, seconds: float) -> tuple[dict[str, Any], bytes]:
        if not channel.wait(seconds):
            raise CallFailed(f"took more than {seconds:g} s")
        return channel.recv()

    def _failed(self, error: BaseException) -> BaseException:
        """End the process, since it may be in the middle of the call. Returns the error to raise."""
        status = self._end()
        if not isinstance(error, ChannelClosed):
            return error
        return CallFailed(f"failed: its process {describe_exit(status, 'working')}")

    def _end(self) -> int:
        """Kill the process if it has not ended, and return its exit status."""
        popen, channel = self._popen, self._channel
        self._popen = self._channel = None
        assert popen is not None and channel is not None
        try:
            # The process closes its end of the channel just before it has an exit status of its own.
            status = popen.wait(1.0) if channel.wait(0.0) else None
        except subprocess.TimeoutExpired:
            status = None
        popen.kill()
        channel.close()
        return popen.wait() if status is None else status

    def close(self) -> None:
        """Kill the process and wait for its end; a call in progress fails. Idempotent, callable from any thread."""
        self._closed = True
        if (popen := self._popen) is not None:
            popen.kill()
            popen.wait()


def answer_calls(control_fd: int, parent: int, prepare: Callable[[Mapping[str, Any]], Callable[..., str]]) -> None:
    """Main function of such a process. `prepare(setup)` returns the function to call. Import all that it needs before:
    memory that is occupied by now does not count towards the limit."""
    channel = enter(control_fd, parent, signal.SIGINT, signal.SIGTERM)
    try:
        memory: int = channel.recv()[0]["memory"]
        _limit_memory(memory)
        channel.send({})
        call: Callable[..., str] | None = None
        while True:
            message, _ = channel.recv()
            if "setup" in message:
                call = prepare(message["setup"])
                continue
            error, text = "", b""
            try:
                assert call is not None, "the setup comes first"
                text = call(**message["arguments"]).encode()
            except MemoryError:
                error = f"needs more than {memory >> 20} MiB of memory"
            except Exception as failure:  # The code that is called may raise anything.
                error = _shown(failure)
            channel.send({"error": error}, text)
    except ChannelClosed:
        os._exit(0)


def _shown(error: Exception) -> str:
    """Return the error as text that can be encoded."""
    text = str(error) if isinstance(error, DovetailError) else f"raised {type(error).__name__}: {error}"
    shown = " ".join(text[: 4 * _LONGEST_REASON].split()).encode(errors="replace").decode()
    return shown if len(shown) <= _LONGEST_REASON else f"{shown[:_LONGEST_REASON]} ..."


def _limit_memory(memory: int) -> None:
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as file:
        occupied = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (occupied + memory, occupied + memory))
