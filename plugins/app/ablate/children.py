"""Parent side of the measuring processes, of which one runs at a time: start, messages and end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dovetail.core.parallel.channel import ChannelClosed
from dovetail.core.parallel.failure import remote_cause
from dovetail.core.parallel.process import start_process

OUTPUT_LINES = 60
"""Lines of a process's output that are shown when it dies."""
EXIT_SECONDS = 30.0
"""Time limit for a process to shut down its engine before it is killed, and for its ranks to exit after it."""
POLL_SECONDS = 0.2

Phase = Callable[[str, float | None], None]


class Failure(Exception):
    """A process returned no result; the message gives the reason."""


class Child:
    """Process that runs an entry point of `worker`. Its ranks and replicas are its children and end with it."""

    def __init__(self, entry: str) -> None:
        out, child_end = os.pipe()
        try:
            self._popen, self._channel = start_process(f"dovetail.plugins.app.ablate.worker:{entry}", output=child_end)
        finally:
            os.close(child_end)
        self._output: deque[str] = deque(maxlen=OUTPUT_LINES)
        # Ranks inherit the pipe. It closes when all of them have exited and their GPU memory is free.
        self._reader = threading.Thread(target=self._read, args=(out,), name="dovetail-ablate-output", daemon=True)
        self._reader.start()
        self._busy = False

    def ask(self, order: Mapping[str, Any], phase: Phase = lambda name, share: None) -> dict[str, Any]:
        """Send an order and return the result. Raises Failure."""
        self._busy = True
        try:
            self._channel.send(order)
            while True:
                while not self._channel.wait(POLL_SECONDS):
                    pass
                message, _ = self._channel.recv()
                if message["op"] == "result":
                    self._busy = False
                    value: dict[str, Any] = message["value"]
                    return value
                if message["op"] == "error":
                    raise Failure(message["text"]) from remote_cause(message["traceback"])
                phase(message["name"], message["share"])
        except ChannelClosed:
            raise Failure(self._death()) from None

    def close(self) -> None:
        """Shut the process down, or kill it after a timeout; its ranks and replicas end with it. Idempotent."""
        try:
            if self._busy and self._popen.poll() is None:
                # Ctrl-C reaches only the parent, so pass it on.
                self._popen.send_signal(signal.SIGINT)
            self._channel.close()
            try:
                self._popen.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                pass
        finally:
            self._popen.kill()
            self._popen.wait()
            self._reader.join(EXIT_SECONDS)

    def _death(self) -> str:
        code = self._popen.wait()
        self._reader.join(1.0)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        output = "\n".join(self._output)
        return f"its process {how}" + (f"; its last output:\n{output}" if output else " without any output")

    def _read(self, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8", errors="replace") as out:
            for line in out:
                self._output.append(line.rstrip("\n"))
