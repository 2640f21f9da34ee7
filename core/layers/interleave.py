"""Several forwards of one model in turns, so that the ranks' sums of one run under the products of another.

`Model.layers` hands out its collective calls. Between two of them a lane works on the current stream (main); the calls
of all lanes run on one side stream, in the order of the lanes, which is the same on every rank:

    main   A's attention | B's attention | A's MLP    | B's MLP   | ...
    side                 | A's boundary  | B's        | A's       | ...

Two streams share memory here, and the caching allocator gives what a stream allocated back to that stream, whoever
still reads it on another. So that nothing needs `record_stream`, whose memory comes back late:

1. A call begins when all that main has been given is done. The side stream so writes again to memory of its own that
   was dropped only after main has read it.
2. What a call reads lives until main waits for that call. Main so writes again to memory of its own that was dropped
   only after the side stream has read it.
3. A lane reads the bundle that a boundary made of a sum before it hands out the boundary of its next one. With two
   lanes of the same sums a collective may so use two places in turn for what it gathers (`Collective.beside`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from dovetail.core.interfaces import Hidden, Layers


def run_layers(layers: Layers) -> Hidden:
    """All of a step at once: each call is made where it is handed out."""
    given = None
    try:
        while True:
            given = layers.send(given)()
    except StopIteration as end:
        return end.value


class Side(Protocol):
    """Where collective calls run."""

    def begin(self) -> None:
        """From here on the current stream is main; before the first call of a step."""

    def start(self, call: Callable[[], Any]) -> Any:
        """The call under way, for `finish`."""

    def finish(self, started: Any) -> Any:
        """What the call returned, for later work on the current stream."""


class Inline:
    """Calls run at once, as part of the current stream: for devices without streams."""

    def begin(self) -> None: ...

    def start(self, call: Callable[[], Any]) -> Any:
        return call()

    def finish(self, started: Any) -> Any:
        return started


class SideStream:
    """A stream of higher priority: a sum needs few multiprocessors, but every rank waits until it has them.

    With eight ranks the device does a half's share of a block in as little time as the host takes to launch it, so
    streams are looked up once, and not switched by context managers, which look them up again."""

    _main: torch.cuda.Stream
    """Current since `begin`."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._given = torch.cuda.Event()
        """Of main; a wait takes what was recorded last."""

    def begin(self) -> None:
        self._main = torch.cuda.current_stream(self.stream.device)

    def start(self, call: Callable[[], Any]) -> Any:
        self._given.record(self._main)
        self.stream.wait_event(self._given)
        torch.cuda.set_stream(self.stream)
        try:
            result = call()
        finally:
            torch.cuda.set_stream(self._main)
        done = torch.cuda.Event()
        done.record(self.stream)
        return call, result, done

    def finish(self, started: Any) -> Any:
        call, result, done = started
        self._main.wait_event(done)
        return result


def interleave(
    lanes: Sequence[Layers], side: Side, enter: Callable[[int], None] = lambda lane: None
) -> tuple[Hidden, ...]:
    """What each lane returns; the first was given the earlier tokens, and is ahead in every layer. `enter` is called
    before a lane goes on."""
    found: dict[int, Hidden] = {}
    turns: deque[tuple[int, Any]] = deque()

    def go_on(lane: int, given: Any) -> None:
        enter(lane)
        try:
            call = lanes[lane].send(given)
        except StopIteration as end:
            found[lane] = end.value
        else:
            turns.append((lane, side.start(call)))

    side.begin()
    for lane in range(len(lanes)):
        go_on(lane, None)
    while turns:
        lane, started = turns.popleft()
        given = side.finish(started)
        # With this the last of what the call read may go.
        del started
        go_on(lane, given)
    return tuple(found[lane] for lane in range(len(lanes)))
