"""Runs a workload on engines without text. One replica is stepped directly, in one thread, so that no other thread
takes the interpreter's lock. Several replicas run in processes, under a request table; those with a virtual time are
stepped in this process too.

The calling thread only waits for Ctrl-C, which a thread that waits for a rank in C code would not receive."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dovetail.core.compose.composition import Lane
from dovetail.core.engine.checks import has_virtual_time
from dovetail.core.errors import ConfigError, RequestError
from dovetail.core.interfaces import FinishReason, Progress, RequestOptions, SamplingParams, TimedRequest, TokenLogprobs
from dovetail.core.parallel.failure import for_user
from dovetail.core.parallel.lockstep import Lockstep
from dovetail.plugins.app.bench.drives import Drive, StepDrive, TableDrive
from dovetail.plugins.app.bench.metrics import Timeline
from dovetail.plugins.app.bench.target import OnDone, Target

if TYPE_CHECKING:
    from dovetail.core.compose import Composition
    from dovetail.core.engine.engine import Engine
    from dovetail.core.frontend.engines import Engines
    from dovetail.core.frontend.request_table import Delivery, OpenRequest

Answer = tuple[list[int], list[TokenLogprobs]]
"""Output tokens and prompt log-probabilities of one prompt."""


class EngineTarget(Target):
    _stepped: Sequence[Engine] = ()
    """Engines that this process steps; empty if replicas have processes. Set by `start`."""
    _lockstep: Lockstep | None = None
    """Set by `start` if those engines are lanes."""
    engine: Any = None
    """An Engine, or Engines if there are replicas in processes; the first of several simulated ones. Set by `start`."""

    def now(self) -> float:
        return max((one.clock() for one in self._stepped), default=super().now())

    @property
    def adapters(self) -> Collection[str]:
        part = self.composition.part("adapter")
        loaded: Mapping[str, str] = part.target().initial(part.config)
        return loaded

    def check_grammars(self) -> None:
        if self.composition.choices["grammar"] == "none":
            raise ConfigError("the workload has requests with a grammar, which grammar=none refuses: choose another")
        _ = self.tokenizer

    def start(self, progress: Progress) -> dict[str, Any]:
        from dovetail.core.engine.engine import start_engine
        from dovetail.core.frontend.engines import start_engines
        from dovetail.core.frontend.replicas import CheckedRouter, replica_compositions

        began = time.perf_counter()
        engine, virtual = self.composition.engine, has_virtual_time(self.composition)
        self._router = CheckedRouter(self.composition) if virtual and engine.dp > 1 else None
        if engine.dp == 1 or virtual:
            if virtual and engine.record is None:
                # Replicas without GPUs and files of their own are alike.
                alone = engine.model_copy(update={"dp": 1})
                parts = [replace(self.composition, engine_config=alone)] * engine.dp
            else:
                parts = replica_compositions(self.composition)
            if engine.lanes > 1:
                self._start_lanes(parts, progress)
            else:
                for one in parts:
                    self._stepped = [*self._stepped, start_engine(one, progress)]
            self.engine = self._stepped[0]
        else:
            self.engine = start_engines(self.composition, progress)
        # As in a server: what was loaded stays, so the collector need not traverse it again and again.
        gc.collect()
        gc.freeze()
        info = self.engine.info
        self.max_len = info.max_len
        return {
            "target": "engine",
            "layout": {"tp": engine.tp, "pp": engine.pp, "dp": engine.dp},
            "device": info.device,
            "startup_s": round(time.perf_counter() - began, 3),
            "phases_s": {name: round(seconds, 3) for name, seconds in info.phases.items()},
            "kv_pages": dict(info.num_pages),
            "slower_paths": list(info.notes),
            "tuning": info.tuning,
        }

    def _start_lanes(self, parts: Sequence[Composition], progress: Progress) -> None:
        """Start simulated lanes, which this thread steps in lockstep."""
        from dovetail.core.engine.engine import start_engine

        self._lockstep = Lockstep(len(parts))
        for one, lane in zip(parts, self._lockstep.lanes, strict=True):
            placed = replace(one, lane=Lane(lane.number, len(parts), "", self._lockstep))
            engine = start_engine(placed, progress, lanes=lane)
            self._stepped = [*self._stepped, engine]
            lane.clock = engine.executor.clock
        self._lockstep.step = lambda number: self._stepped[number].step()

    def run(self, requests: Sequence[TimedRequest], on_done: OnDone) -> tuple[list[Timeline], dict[str, Any]]:
        """Run requests at their arrival times. All that have arrived are queued before the next step."""
        # Otherwise this run would find the prompts of the last one in the cache.
        kept = [one for one in self._stepped or [self.engine] if not one.reset_cache()]
        gc.collect()
        drive: Drive
        if self._stepped:
            drive = StepDrive(self._stepped, requests, on_done, self._router, self._lockstep)
        else:
            drive = TableDrive(self.engine, requests, on_done)
        self._run_in_thread(drive)
        return drive.timelines, drive.figures() | ({"prefix_cache_kept": True} if kept else {})

    def complete(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        """Run all prompts at once, without cached prefixes. Raises RequestError for a prompt that cannot run."""
        self.engine.reset_cache()
        complete = _step_to_the_end if self._stepped else _submit_and_wait
        return complete(self.engine, prompts, params)

    def _run_in_thread(self, drive: Drive) -> None:
        from dovetail.core.frontend.local_engine import STEP_SECONDS

        ended: Future[None] = Future()

        def run() -> None:
            try:
                drive.run()
            except Exception as error:
                ended.set_exception(for_user(error, self.composition))
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        # Not joined: a join that Ctrl-C breaks off marks the thread as ended (Python 3.11).
        threading.Thread(target=run, name="dovetail-bench", daemon=True).start()
        try:
            wait([ended])
        except BaseException:
            drive.stopped = True
            if not wait([ended], STEP_SECONDS).done:
                drive.interrupt()
                wait([ended])
            raise
        ended.result()

    def close(self) -> None:
        for one in self._stepped:
            one.shutdown()
        if self.engine is not None and not self._stepped:
            self.engine.close()


def _step_to_the_end(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[Answer]:
    found: dict[int, Answer] = {}
    for ids, one in zip(prompts, params, strict=True):
        (seq,) = engine.add(ids, one)
        found[seq.uid] = ([], [])
    while engine.has_work:
        for event in engine.step():
            if event.reason is FinishReason.REJECTED:
                raise RequestError(event.detail)
            tokens, logprobs = found[event.uid]
            tokens += event.tokens
            logprobs += event.prompt_logprobs
    return list(found.values())


def _submit_and_wait(
    engines: Engines, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[Answer]:
    from dovetail.core.frontend.request_table import NewRequest

    found: list[Answer] = [([], []) for _ in prompts]
    done: list[Future[None]] = [Future() for _ in prompts]

    def deliver(number: int, request: OpenRequest, delivery: Delivery) -> None:
        for delta in delivery.deltas:
            found[number][0].extend(delta.token_ids)
            found[number][1].extend(delta.prompt_logprobs)
        if delivery.error is not None:
            done[number].set_exception(delivery.error)
        elif delivery.last:
            done[number].set_result(None)

    pairs = enumerate(zip(prompts, params, strict=True))
    engines.table.submit(*(NewRequest(ids, one, RequestOptions(), partial(deliver, i)) for i, (ids, one) in pairs))
    for one in done:
        one.result()
    return found
