"""One worker process: a rank above 0. Composes for itself, loads, then runs what the plan ring brings."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from concurrent.futures import Future
from typing import Any

from dovetail.core.interfaces import JoinBlob
from dovetail.core.parallel.channel import Channel, ChannelClosed
from dovetail.core.parallel.encoding import decode_blob, decode_late, decode_plan
from dovetail.core.parallel.process import enter, recompose, report
from dovetail.core.parallel.ring import RingReader
from dovetail.core.parallel.slot_ledger import SlotLedger

_TELL_SECONDS = 1.0
"""Between two words that a phase goes on."""
CONTROL = b""
"""A message of the plan ring that says: the next control message is due, in order with the plans."""


def main(control_fd: int, parent: int) -> None:
    """Entry of the process, which runs until it is told to end, or the parent is gone."""
    control = enter(control_fd, parent, signal.SIGINT)
    try:
        order, _ = control.recv()
        _Worker(control, order).run()
    except ChannelClosed:
        # Nobody is left to tell.
        os._exit(1)
    except BaseException as error:
        report(control, error)
        os._exit(1)
    sys.stdout.flush()
    # Threads of collectives and allocators have nothing left to do, and some of them take seconds to say so.
    os._exit(0)


class _Worker:
    def __init__(self, control: Channel, order: dict[str, Any]) -> None:
        self.control = control
        self.rank: int = order["rank"]
        self.phase, self._told = "", 0.0
        self.plans = RingReader(order["plan_fd"], self.rank - 1)
        self.blobs = RingReader(order["blob_fd"], self.rank - 1)
        self.composition = recompose(order)
        self.load = load_object(order["loader"])
        self.place = {"rank": self.rank, "size": order["size"], "address": order["address"]}

    def run(self) -> None:
        control = self.control
        control.send({"op": "ready"})
        self._expect("load")
        rank = self.load(self.composition, self._progress, **self.place)
        control.send({"op": "loaded", "pages": sorted(rank.info.num_pages.items())})
        runner = rank.bind({int(group): int(pages) for group, pages in self._expect("bind")["pages"]})
        control.send({"op": "bound"})
        self._serve(runner)
        runner.close()

    def _serve(self, runner: Any) -> None:
        mirror = SlotLedger()
        while True:
            message = self.plans.recv(self._idle)
            if message == CONTROL:
                if not self._obey(runner):
                    return
                continue
            plan, state = decode_plan(message)
            mirror.verify(state, plan.step)
            mirror.apply(plan)
            blobs: dict[tuple[int, int], JoinBlob] = {}
            for join in plan.joins:
                uid, epoch, blob = decode_blob(self.blobs.recv(self._idle))
                if (uid, epoch) != (join.uid, join.epoch):
                    raise ValueError(
                        f"step {plan.step}: uid {join.uid}, epoch {join.epoch} joins, and the blob that came is for "
                        f"uid {uid}, epoch {epoch}"
                    )
                blobs[uid, epoch] = blob
            runner.execute(plan, blobs)
            if mirror.waiting is not None:
                late = decode_late(self.blobs.recv(self._idle))
                mirror.complete(late)
                runner.complete(late)

    def _obey(self, runner: Any) -> bool:
        """Do what the next control message says; False = shut down."""
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
                raise ValueError(f"rank {self.rank} was sent {other!r} while it serves")
        return True

    def _idle(self, seconds: float) -> None:
        """Sleep, but notice that the parent is gone: its end of the socket closes."""
        if self.control.wait(seconds) and self.control.at_end():
            raise ChannelClosed

    def _expect(self, op: str) -> dict[str, Any]:
        message, _ = self.control.recv()
        if message["op"] != op:
            raise ValueError(f"rank {self.rank} expected {op!r} and was sent {message['op']!r}")
        return message

    def _progress(self, phase: str, share: float | None) -> None:
        """Tells what it is doing, for the message should it die there, and that it goes on."""
        now = time.monotonic()
        if phase != self.phase or now - self._told >= _TELL_SECONDS:
            self.phase, self._told = phase, now
            self.control.send({"op": "phase", "phase": phase})


def answer(key: str, done: Future[None]) -> dict[str, str]:
    """What a rank says of an adapter that it has read, or could not."""
    if done.cancelled():
        return {"key": key, "error": "adapter: the rank stops"}
    error = done.exception()
    return {"key": key, "error": "" if error is None else str(error)}


def load_object(reference: str) -> Any:
    """Return the object at "package.module:name"."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
