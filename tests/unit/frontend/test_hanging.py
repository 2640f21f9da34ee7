"""Detection of a hung engine process. Scripts take the place of slow and hung engines."""

from __future__ import annotations

import queue
import signal
import socket
import time
from pathlib import Path

import pytest
import zmq

from dovetail import compose
from dovetail.core.frontend import engine_process
from dovetail.core.frontend.messages import Abort, Add, StepMessage, encode_output
from dovetail.core.interfaces import RequestOptions, SamplingParams
from dovetail.core.parallel.channel import Channel
from dovetail.core.parallel.process import SHOW_STACKS, start_process

TIMEOUT = 0.6
INFO = dict(model="m", checkpoint=None, vocab=1, max_len=1, max_seqs=1, device="cpu", start_seconds=0.0)
INFO |= dict(embedding=None, hidden=1, head=True, notes=[])


def scripted(control_fd: int, parent: int) -> None:
    """Script of an engine process: starts slowly, works on the first command for three times the timeout, is then idle,
    and never executes the second command."""
    signal.signal(SHOW_STACKS, signal.SIG_IGN)
    control = Channel(socket.socket(fileno=control_fd))
    order, _ = control.recv()
    context = zmq.Context()
    commands, outputs = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.bind(order["link"]["commands"])
    outputs.connect(order["link"]["outputs"])
    time.sleep(2 * TIMEOUT)
    control.send({"op": "ready", "info": INFO})
    commands.recv()
    for _ in range(6):
        outputs.send(encode_output(StepMessage([], None, 1)))
        time.sleep(TIMEOUT / 2)
    outputs.send(encode_output(StepMessage([], None, 1, idle=True)))
    time.sleep(60)


def never_starts(control_fd: int, parent: int) -> None:
    signal.signal(SHOW_STACKS, signal.SIG_IGN)
    control = Channel(socket.socket(fileno=control_fd))
    control.recv()
    control.send({"op": "progress", "phase": "compile kernels", "share": None})
    time.sleep(60)


class Events(queue.SimpleQueue[object]):
    """Listener that records events."""

    def on_progress(self, process, phase):
        process._link._start_timeout = TIMEOUT

    def on_ready(self, process, info):
        self.put("ready")

    def on_message(self, process, message):
        if message.idle:
            self.put("idle")

    def on_death(self, process, cause):
        self.put(cause)


def start_script(script, events: Events, monkeypatch: pytest.MonkeyPatch) -> engine_process.EngineProcess:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))  # lets the script's process import this module
    entry = f"{__name__}:{script.__name__}"
    monkeypatch.setattr(engine_process, "start_process", lambda *_: start_process(entry))
    engine = engine_process.EngineProcess(compose(["+preset=tiny_cpu"]), events, timeout=TIMEOUT)
    engine.start()
    return engine


def test_a_start_without_progress_counts_as_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    engine = start_script(never_starts, events, monkeypatch)
    assert "while starting in phase 'compile kernels' (engine.start_timeout)" in str(events.get(timeout=60))
    assert engine.hung_at_start


def test_silence_counts_as_hanging_only_while_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    engine = start_script(scripted, events, monkeypatch)
    assert events.get(timeout=90) == "ready"
    engine.send(Add(1, [1], SamplingParams(), RequestOptions()))
    assert events.get(timeout=90) == "idle"
    with pytest.raises(queue.Empty):
        events.get(timeout=3 * TIMEOUT)
    began = time.monotonic()
    engine.send(Abort(1))
    assert str(events.get(timeout=90)).startswith("hangs")
    assert time.monotonic() - began > TIMEOUT * 0.7
