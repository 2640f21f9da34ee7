"""Lanes as threads of one process, connected by gloo: each runs an engine of one rank through a script."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dovetail import SamplingParams
from dovetail.core.compose import compose
from dovetail.core.compose.composition import Lane
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.interfaces import Observer, StepRecord
from dovetail.core.parallel.address import free_address
from dovetail.core.parallel.lanes import LaneBoard, Lanes

SMALL = ("app=generate", "engine.device=cpu", "engine.max_len=64", "engine.kv_pages=64", "engine.token_budget=32")


@dataclass
class Work:
    """A request, and when it comes and goes."""

    number: int
    prompt: Sequence[int]
    params: SamplingParams
    after: int = 0
    """Calls of the lane's loop before it comes."""
    aborted_after: int | None = None
    """Calls of the loop between its start and its abort; None = it runs to its end."""


@dataclass
class Done:
    """Results of one lane."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    """uid -> tokens."""
    preemptions: int = 0
    empty: int = 0
    """Plans without rows."""
    accepted: int = 0
    moved: int = 0
    """Experts that moved to another slot."""
    loads: list[tuple[float, float]] = field(default_factory=list)
    """Expert loads that records of steps have: on the busiest rank, and the mean."""


class Loads(Observer):
    def __init__(self, done: Done) -> None:
        super().__init__(None)
        self.done = done

    def step(self, record: StepRecord) -> None:
        if record.mean_expert_load:
            self.done.loads.append((record.expert_load, record.mean_expert_load))


class Loop:
    """The loop of one lane: an engine loop with a script in place of commands."""

    def __init__(self, engine: Engine, script: Sequence[Work], lanes: Lanes | None) -> None:
        self.engine, self.script, self.lanes = engine, list(script), lanes
        self.done, self.calls = Done(), 0
        self._aborts: list[tuple[int, list[int]]] = []
        submit = engine.executor.submit

        def counted(plan: Any, blobs: Any) -> None:
            self.done.empty += not plan.rows
            submit(plan, blobs)

        engine.executor.submit = counted
        engine.observers["loads"] = Loads(self.done)

    @property
    def over(self) -> bool:
        return not (self.script or self._aborts or self.engine.has_work)

    def call(self) -> None:
        """Execute what is due, then step, or sleep until another lane has work."""
        engine = self.engine
        self.calls += 1
        for work in [work for work in self.script if work.after < self.calls]:
            self.script.remove(work)
            uids = [seq.uid for seq in engine.add(work.prompt, work.params, number=work.number)]
            if work.aborted_after is not None:
                self._aborts.append((self.calls + work.aborted_after, uids))
        for due, uids in [entry for entry in self._aborts if entry[0] <= self.calls]:
            self._aborts.remove((due, uids))
            for uid in uids:
                engine.abort(uid)
        if engine.has_work:
            for event in engine.step():
                self.done.tokens.setdefault(event.uid, []).extend(event.tokens)
        elif self.lanes is not None:
            select.select([self.lanes.alarm], [], [], 0.001)
            self.lanes.silence()
        self.done.preemptions = engine.scheduler.stats().preemptions
        self.done.accepted = engine.counters.accepted
        balancer = engine.executor._runner.parts.balancer
        self.done.moved = 0 if balancer is None else balancer.moved


def alone(script: Sequence[Work], *overrides: str) -> Done:
    """Run a script on one engine with all experts."""
    engine = start_engine(compose([*SMALL, *overrides]))
    try:
        loop = Loop(engine, script, None)
        while not loop.over:
            loop.call()
        engine.kv.check()
        return loop.done
    finally:
        engine.shutdown()


@contextmanager
def lanes(count: int, *overrides: str) -> Iterator[Callable[[Sequence[Sequence[Work]]], list[Done]]]:
    """Start lanes. Yield run(script of each lane) -> results of each, which may be called repeatedly."""
    board = LaneBoard(count)
    with free_address() as address, ThreadPoolExecutor(count) as pool:
        engines: list[Engine] = []

        def access(number: int) -> Lanes:
            order = board.order(number)
            duplicates = {"fd": os.dup(order["fd"]), "alarm": os.dup(order["alarm"])}
            return Lanes(**{**order, **duplicates, "alarms": [os.dup(fd) for fd in order["alarms"]]})

        def start(number: int) -> Engine:
            composition = replace(compose([*SMALL, *overrides]), lane=Lane(number, count, address))
            try:
                return start_engine(composition, lanes=access(number))
            except BaseException:
                board.end()
                raise

        engines = list(pool.map(start, range(count)))
        lasting = threading.Barrier(count)

        def run_one(engine: Engine, script: Sequence[Work], over: list[bool]) -> Done:
            loop = Loop(engine, script, engine._lanes)
            try:
                while not all(over):
                    loop.call()
                    over[engine._lanes.number] = loop.over
                lasting.wait(60)
                engine.kv.check()
                return loop.done
            except BaseException:
                board.end()
                lasting.abort()
                raise

        def run(scripts: Sequence[Sequence[Work]]) -> list[Done]:
            over = [False] * count
            return list(pool.map(run_one, engines, scripts, [over] * count))

        try:
            yield run
        finally:
            board.end()
            list(pool.map(Engine.shutdown, engines))
            board.close()
