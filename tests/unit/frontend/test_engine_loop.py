"""The step loop of an engine's process."""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import Any
from unittest import mock

import msgspec
import pytest

from dovetail.core.engine.results import SequenceEvent
from dovetail.core.frontend.engine_loop import StepLoop
from dovetail.core.frontend.messages import Abort, Control, Reply, StepMessage
from dovetail.core.frontend.zmq_link import Link
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
    loop = StepLoop(engine, control, stays.addresses)
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
        goes.send(msgspec.msgpack.encode(Abort(7)))
        assert loop._links[1].commands.poll(SECONDS * 1000)
        owner.send({"op": "detach", "link": 1})
        go_on.set()
        # The first may be read in one go with the order to detach.
        for number in (3, 4):
            stays.send(msgspec.msgpack.encode(Control(number, "check")))
            while not isinstance(message := heard.get(timeout=SECONDS), Reply):
                pass
            assert message.id == number and not message.error
    finally:
        go_on.set()
        owner.send({"op": "stop"})
        threads[0].join(SECONDS)
        # Where the loop failed its sockets are open, and what they still had to send would be waited for.
        loop._context.destroy(linger=0)
        control.close()
        threads[1].join(SECONDS)
        for link in (goes, stays):
            link.close()
        engine.shutdown()


def test_a_step_is_put_off_while_commands_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whole milliseconds at the poller, for less by naps."""
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    loop: Any = StepLoop.__new__(StepLoop)
    loop._poller, loop._links, loop._loading, loop._stats_due = mock.Mock(), {}, [], 0.0
    loop._poller.poll.return_value = []
    loop._engine = mock.Mock(has_work=True)
    loop._engine.launch_delay.side_effect = [0.0057, 0.0006, 0.0004, 0.0]
    assert loop._take_commands()
    assert [call.args[0] for call in loop._poller.poll.call_args_list] == [0, 5, 0, 0]
    assert len(naps) == 2
