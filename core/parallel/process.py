"""A Python process of ours: neither forked nor pickled. It composes for itself from the words it is sent."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from dovetail.core.parallel.channel import Channel

SHOW_STACKS = signal.SIGUSR1
"""Makes such a process write to stderr where each of its threads is."""
LAST_LOOK_SECONDS = 1.0
"""For a process that hangs, to write that."""
_BOOT = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
module, _, name = sys.argv[2].partition(":")
getattr(importlib.import_module(module), name)(int(sys.argv[3]), int(sys.argv[4]))
"""


def start_process(
    entry: str, inherited: Sequence[int] = (), environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Channel]:
    """Runs `entry` ("module:function") as function(descriptor of its end of the channel, pid of this process).

    Linux ends the process with the *thread* that calls this (where the entry asks for it: `worker.die_with`)."""
    ours, theirs = socket.socketpair()
    path = json.dumps([os.path.abspath(folder) for folder in sys.path])
    with theirs:
        popen = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, path, entry, str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(), *inherited),
            stdin=subprocess.DEVNULL,
            env=environment,
            # Ctrl-C in a terminal then reaches the starting process alone, which ends the others in order.
            process_group=0,
        )
    return popen, Channel(ours)


def end_hung(popen: subprocess.Popen[bytes]) -> None:
    """It writes where its threads are, and is killed. Returns at once; from any thread."""
    popen.send_signal(SHOW_STACKS)
    last_look = threading.Timer(LAST_LOOK_SECONDS, popen.kill)
    last_look.daemon = True
    last_look.start()
