"""Worker process of one rank above 0: recreates the composition, loads the model, then runs the plans from the ring."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import Future
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from dovetail.core.heap import freeze_heap, rare_collections
from dovetail.core.interfaces import JoinBlob
from dovetail.core.parallel.channel import Channel, ChannelClosed
from dovetail.core.parallel.encoding import decode_blob, decode_late, decode_plan
from dovetail.core.parallel.process import enter, recompose, report
from dovetail.core.parallel.ring import RingReader
from dovetail.core.parallel.slot_ledger import SlotLedger

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

_PROGRESS_SECONDS = 1.0
"""Interval between two progress messages of one phase."""
CONTROL = b""
"""Message in the plan ring: read the next control message now, in order with the plans."""


def main(control_fd: int, parent: int) -> None:
    """Entry point of the process. Runs until the parent requests shutdown or ends."""
    control = enter(control_fd, parent, signal.SIGINT)
    composition = None
    try:
        order, _ = control.recv()
        composition = recompose(order)
        _Worker(control, order, composition).run()
    except ChannelClosed:
        # The parent has ended, so the error cannot be reported.
        os._exit(1)
    except BaseException as error:
        report(control, error, composition)
        os._exit(1)
    sys.stdout.flush()
    # Remaining threads of collectives and allocators have no work, but some take seconds to end.
    os._exit(0)


class _Worker:
    def __init__(self, control: Channel, order: dict[str, Any], composition: Composition) -> None:
        self.control = control
        self.rank: int = order["rank"]
        self.phase, self._reported = "", 0.0
        self.plans = RingReader(order["plan_fd"], self.rank - 1)
        self.blobs = RingReader(order["blob_fd"], self.rank - 1)
        self.composition = composition
        with rare_collections():
            self.load = resolve_name(order["loader"])
        self.place = {"rank": self.rank, "size": order["size"], "address": order["address"]}

    def run(self) -> None:
        control = self.control
        control.send({"op": "ready"})
        self._expect("load")
        rank = self.load(self.composition, self._progress, **self.place)
        control.send({"op": "loaded", "pages": sorted(rank.info.num_pages.items())})
        runner = rank.bind({int(group): int(pages) for group, pages in self._expect("bind")["pages"]})
        freeze_heap()
        control.send({"op": "bound"})
        self._serve(runner)
        runner.close()

    def _serve(self, runner: Any) -> None:
        ledger = SlotLedger()
        while True:
            message = self.plans.recv(self._idle)
            if message == CONTROL:
                if not self._control(runner):
                    return
                continue
            plan, state = decode_plan(message)
            ledger.verify(state, plan.step)
            ledger.apply(plan)
            blobs: dict[tuple[int, int], JoinBlob] = {}
            for join in plan.joins:
                uid, epoch, blob = decode_blob(self.blobs.recv(self._idle))
                if (uid, epoch) != (join.uid, join.epoch):
                    raise ValueError(
                        f"step {plan.step}: uid {join.uid}, epoch {join.epoch} joins, but the blob received is for "
                        f"uid {uid}, epoch {epoch}"
                    )
                blobs[uid, epoch] = blob
            runner.execute(plan, blobs)
            if ledger.waiting is not None:
                late = decode_late(self.blobs.recv(self._idle))
                ledger.complete(late)
                runner.complete(late)

    def _control(self, runner: Any) -> bool:
        """Execute the next control message. Returns False for shutdown."""
        message, _ = self.control.recv()
        match message["op"]:
            case "shutdown":
                return False
            case "load_adapter":
                key = message["key"]
                read = runner.load_adapter(key, message["folder"])
                read.add_done_callback(lambda done: self.control.send({"op": "answer", **answer(key, done)}))
            case "unload_adapter":
                runner.unload_adapter(message["key"])
            case other:
                raise ValueError(f"rank {self.rank} was sent {other!r} while serving")
        return True

    def _idle(self, seconds: float) -> None:
        """Sleep, but detect the parent's end: its side of the socket closes."""
        if self.control.wait(seconds) and self.control.at_end():
            raise ChannelClosed

    def _expect(self, op: str) -> dict[str, Any]:
        message, _ = self.control.recv()
        if message["op"] != op:
            raise ValueError(f"rank {self.rank} expected {op!r} and was sent {message['op']!r}")
        return message

    def _progress(self, phase: str, share: float | None) -> None:
        """Report the phase, for the message if the process dies in it, and as a sign of progress."""
        now = time.monotonic()
        if phase != self.phase or now - self._reported >= _PROGRESS_SECONDS:
            self.phase, self._reported = phase, now
            self.control.send({"op": "phase", "phase": phase})


def answer(key: str, done: Future[None]) -> dict[str, str]:
    """Return the message that reports the outcome of reading an adapter."""
    if done.cancelled():
        return {"key": key, "error": "adapter: the rank is shutting down"}
    error = done.exception()
    return {"key": key, "error": "" if error is None else str(error)}
