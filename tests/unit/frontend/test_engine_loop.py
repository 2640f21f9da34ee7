"""The step loop of an engine's process."""

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
from dovetail.core.frontend.zmq_link import Link, ZmqMailbox
from dovetail.core.interfaces import SamplingParams
from dovetail.core.parallel.channel import Channel
from dovetail.core.testing.observer import observed_engine

SECONDS = 60


def test_a_link_that_goes_with_commands_unread_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """During one step a process sends a command and dies, its owner says so, and another process asks something."""
    engine = observed_engine({})
    engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=2))
    step, in_step, go_on = engine.step, threading.Event(), threading.Event()

    def long_step() -> list[SequenceEvent]:
        in_step.set()
        go_on.wait(SECONDS)
        return step()

    monkeypatch.setattr(engine, "step", long_step)
    owner, control = map(Channel, socket.socketpair())
    heard: queue.SimpleQueue[StepMessage | Reply] = queue.SimpleQueue()
    stays, goes = Link(heard.put), Link(heard.put)
    mailbox = ZmqMailbox(control, **stays.addresses)
    loop = EngineLoop(engine, mailbox)
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
        unread = max(mailbox.ports, key=list(mailbox.ports).index)
        assert unread.commands.poll(SECONDS * 1000)
        owner.send({"op": "detach", "link": 1})
        go_on.set()
        # The first may be read in one go with the order to detach.
        for number in (3, 4):
            stays.send(Control(number, "check"))
            while not isinstance(message := heard.get(timeout=SECONDS), Reply):
                pass
            assert message.id == number and not message.error
    finally:
        go_on.set()
        owner.send({"op": "stop"})
        threads[0].join(SECONDS)
        # Where the loop failed its sockets are open, and what they still had to send would be waited for.
        mailbox.close()
        control.close()
        threads[1].join(SECONDS)
        for link in (goes, stays):
            link.close()
        engine.shutdown()


class ScriptedMailbox:
    """Notes how long the loop is ready to wait for commands; stops after the last of `polls`."""

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
    mailbox = ScriptedMailbox(4)
    mailbox.delays_launches = delays
    EngineLoop(engine, mailbox).run()
    assert mailbox.waits == ([0.0, 0.0057, 0.0006, 0.0] if delays else [0.0] * 4)
    assert engine.step.call_count == (1 if delays else 3)


def test_a_wait_shorter_than_the_pollers_unit_is_a_nap(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    owner, control = map(Channel, socket.socketpair())
    link = Link(lambda message: None)
    mailbox = ZmqMailbox(control, **link.addresses)
    for seconds in (0.0, 5e-4, 2e-3):
        assert list(mailbox.receive(seconds)) == []
    assert len(naps) == 1 and 0.0 < naps[0] < 5e-4
    mailbox.close()
    for end in (owner, control, link):
        end.close()
