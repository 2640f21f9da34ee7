"""The parent's side of the processes: starts one, hears it, and sees it gone before the next begins."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dovetail.core.parallel.channel import ChannelClosed
from dovetail.core.parallel.process import start_process

LAST_WORDS = 60
"""Lines of a process's output that are shown when it dies."""
LEAVE_SECONDS = 30.0
"""For a process to shut its engine down before it is killed, and for its ranks to be gone after it."""
LISTEN_SECONDS = 0.2

Phase = Callable[[str, float | None], None]


class Failure(Exception):
    """Why a process gave no result."""


class Child:
    """Runs an entry of `worker` in a process of its own. Its ranks and replicas are its children and end with it."""

    def __init__(self, entry: str) -> None:
        out, theirs = os.pipe()
        try:
            self._popen, self._channel = start_process(f"dovetail.plugins.app.ablate.worker:{entry}", output=theirs)
        finally:
            os.close(theirs)
        self._words: deque[str] = deque(maxlen=LAST_WORDS)
        # Ranks inherit the pipe: its end says that all of them are gone, and with them what they held of GPUs.
        self._reader = threading.Thread(target=self._read, args=(out,), name="dovetail-ablate-output", daemon=True)
        self._reader.start()
        self._busy = False

    def ask(self, order: Mapping[str, Any], phase: Phase = lambda name, share: None) -> dict[str, Any]:
        """Its result. Raises Failure."""
        self._busy = True
        try:
            self._channel.send(order)
            while True:
                while not self._channel.wait(LISTEN_SECONDS):
                    pass
                message, _ = self._channel.recv()
                if message["op"] == "result":
                    self._busy = False
                    value: dict[str, Any] = message["value"]
                    return value
                if message["op"] == "error":
                    raise Failure(message["text"])
                phase(message["name"], message["share"])
        except ChannelClosed:
            raise Failure(self._last_words()) from None

    def close(self) -> None:
        """Idempotent. In order where it can be, by force where it cannot; its ranks and replicas die with it."""
        try:
            if self._busy and self._popen.poll() is None:
                # A terminal sends Ctrl-C to this process alone.
                self._popen.send_signal(signal.SIGINT)
            self._channel.close()
            try:
                self._popen.wait(LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                pass
        finally:
            self._popen.kill()
            self._popen.wait()
            self._reader.join(LEAVE_SECONDS)

    def _last_words(self) -> str:
        code = self._popen.wait()
        self._reader.join(1.0)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        said = "\n".join(self._words)
        return f"its process {how}" + (f" and said last:\n{said}" if said else ", and said nothing")

    def _read(self, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8", errors="replace") as out:
            for line in out:
                self._words.append(line.rstrip("\n"))
