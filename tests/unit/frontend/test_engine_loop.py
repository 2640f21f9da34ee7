"""The engine loop: commands of attached and detached users, and delayed launches."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from dovetail.core.engine.results import SequenceEvent
from dovetail.core.frontend.engine_loop import EngineLoop
from dovetail.core.frontend.messages import Abort, Control, Reply, StepMessage
from dovetail.core.frontend.zmq_link import Link, ZmqCommands
from dovetail.core.interfaces import SamplingParams
from dovetail.core.parallel.channel import Channel
from dovetail.core.testing.observer import observed_engine

SECONDS = 60


def test_a_link_that_is_detached_with_unread_commands_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """During one step a process sends a command and dies, its owner orders the detachment, and another process sends a
    control."""
    engine = observed_engine({})
    engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=2))
    step, in_step, go_on = engine.step, threading.Event(), threading.Event()

    def long_step() -> list[SequenceEvent]:
        in_step.set()
        go_on.wait(SECONDS)
        return step()

    monkeypatch.setattr(engine, "step", long_step)
    owner, control = map(Channel, socket.socketpair())
    received: queue.SimpleQueue[StepMessage | Reply] = queue.SimpleQueue()
    stays, goes = Link(received.put), Link(received.put)
    commands = ZmqCommands(control, **stays.addresses)
    loop = EngineLoop(engine, commands)
    owner.send({"op": "attach", "link": 1, **goes.addresses})
    threads = [
        threading.Thread(target=loop.run, daemon=True),
        threading.Thread(target=stays.listen, args=(owner.fileno(), lambda: False), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        assert in_step.wait(SECONDS)
        for link in (goes, stays):
            link.open()
        goes.send(Abort(7))
        unread = max(commands.ports, key=list(commands.ports).index)
        assert unread.commands.poll(SECONDS * 1000)
        owner.send({"op": "detach", "link": 1})
        go_on.set()
        # The first control may be read together with the order to detach.
        for number in (3, 4):
            stays.send(Control(number, "check"))
            while not isinstance(message := received.get(timeout=SECONDS), Reply):
                pass
            assert message.id == number and not message.error
    finally:
        go_on.set()
        owner.send({"op": "stop"})
        threads[0].join(SECONDS)
        # If the loop failed, its sockets are open, and terminating their context would wait for unsent messages.
        commands.close()
        control.close()
        threads[1].join(SECONDS)
        for link in (goes, stays):
            link.close()
        engine.shutdown()


class ScriptedCommands:
    """Records how long the loop would wait for commands; stops after `polls` calls of `receive`."""

    delays_launches, ports = True, ()

    def __init__(self, polls: int) -> None:
        self.waits: list[float | None] = []
        self._polls, self.stopped = polls, False

    def receive(self, seconds: float | None) -> Iterator[Any]:
        self.waits.append(seconds)
        self.stopped = len(self.waits) == self._polls
        return iter(())


@pytest.mark.parametrize("delays", [True, False])
def test_a_launch_waits_for_commands_as_long_as_the_engine_allows(delays: bool) -> None:
    engine = mock.Mock(has_work=True)
    engine.launch_delay.side_effect = [0.0057, 0.0006, 0.0]
    engine.step.return_value = []
    commands = ScriptedCommands(4)
    commands.delays_launches = delays
    EngineLoop(engine, commands).run()
    assert commands.waits == ([0.0, 0.0057, 0.0006, 0.0] if delays else [0.0] * 4)
    assert engine.step.call_count == (1 if delays else 3)


def test_a_wait_shorter_than_a_millisecond_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps: list[float] = []
    monkeypatch.setattr(time, "sleep", sleeps.append)
    owner, control = map(Channel, socket.socketpair())
    link = Link(lambda message: None)
    commands = ZmqCommands(control, **link.addresses)
    for seconds in (0.0, 5e-4, 2e-3):
        assert list(commands.receive(seconds)) == []
    assert len(sleeps) == 1 and 0.0 < sleeps[0] < 5e-4
    commands.close()
    for end in (owner, control, link):
        end.close()
