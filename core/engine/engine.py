"""The step loop: schedule, submit, collect, update, with up to `depth` plans in flight. One thread; tokens, no text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from dovetail.core.engine.adapters import AdapterTable
from dovetail.core.engine.checks import check_fit, exact_lengths
from dovetail.core.engine.cost import bind_cost
from dovetail.core.engine.counters import Counters, Observers
from dovetail.core.engine.grammars import Grammars, build_grammars
from dovetail.core.engine.launch_timer import LaunchTimer
from dovetail.core.engine.pooling import Pooler
from dovetail.core.engine.requests import RequestBuilder
from dovetail.core.engine.results import Results, SequenceEvent, ended_event
from dovetail.core.interfaces import (
    Blobs,
    FinishReason,
    HostDraft,
    JoinBlob,
    LateInputs,
    Progress,
    RequestOptions,
    SamplingParams,
    SchedulerContext,
    SchedulerLimits,
    Sequence,
    StepPlan,
    StepRecord,
    StepResult,
)
from dovetail.core.interfaces.plan import LATE, SAMPLE

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


_PLAIN = RequestOptions()


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    schedule_seconds: float
    late: dict[int, int] = field(default_factory=dict)
    """uid -> row of those that need a mask."""
    waits: bool = False
    """Its late inputs are still to be given."""
    follows: bool = False
    """There was work ever since the plan before: if the device was idle between them, it waited for the host."""
    put_off: bool = False
    """It was launched later than it could have been (Engine.launch_delay)."""


class Engine:
    """Built from a composition; call `start` before anything else."""

    def __init__(self, composition: Composition) -> None:
        self.composition = composition
        self.counters = Counters()
        self._sequences: dict[int, Sequence] = {}
        self._launched: deque[_Launched] = deque()
        self._grammars: Grammars | None = None
        self._pooler = Pooler()
        self.observers = Observers()
        self._launch_timer = LaunchTimer() if composition.engine.late_launch else None
        self._steps = 0
        self._had_work = False
        """Since the plan launched last."""

    # Start and end.

    def start(self, progress: Progress = lambda phase, share: None) -> None:
        """Check that the parts fit each other, then load everything; errors surface here."""
        composition, engine = self.composition, self.composition.engine
        check_fit(composition)
        self.executor = composition.build("executor", composition=composition)
        try:
            info = self.info = self.executor.start(progress)
            self.kv = composition.build("kv_cache", groups=info.groups, num_pages=info.num_pages)
            self.limits = SchedulerLimits(
                engine.token_budget,
                engine.max_seqs,
                info.max_len,
                info.lookahead,
                engine.depth,
                weighs_drafts=engine.drafts == "paying",
            )
            self.scheduler = composition.build("scheduler", limits=self.limits, kv=self.kv)
            self._adapters = AdapterTable(self.executor, info.adapter_slots)
            if info.adapter_slots:
                self.scheduler.resources = (self._adapters.slots,)
                self._adapters.load_first(composition)
            self.cost = bind_cost(composition, info.spec, info.device)
            drafter = composition.build("spec_decode")
            self._host_drafter = drafter if drafter.needs_host_tokens else None
            self._requests = RequestBuilder(composition, info.spec, info.max_len)
            observers = composition.many("observer") if "observer" in composition.parts else {}
            self.observers.update({name: part.build() for name, part in observers.items()})
            # A row that sits a step out is shorter than plans in flight count on: no good where that count decides.
            patient = engine.depth > 1 and exact_lengths(composition)
            self._grammars = build_grammars(composition, info.spec, patient=patient)
            self._results = Results(self._sequences, self._grammars, self._pooler)
        except BaseException:
            self.executor.shutdown()
            raise

    def interrupt(self) -> None:
        """From another thread than the one that steps: end a step that does not end. Only `shutdown` may follow."""
        self.executor.interrupt()

    def shutdown(self) -> None:
        self.observers.close()
        if self._grammars is not None:
            self._grammars.close()
        if hasattr(self, "executor"):
            self.executor.shutdown()

    # Requests.

    def add(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        options: RequestOptions = _PLAIN,
        *,
        number: int | None = None,
    ) -> list[Sequence]:
        """Queue a request and return its n sequences.

        A request with a grammar is queued once the grammar is compiled; if it cannot be compiled, the next events of
        its sequences carry the reason. With `options.pooling` the prompt is embedded and `params` is ignored.
        `number` identifies the request; by default numbers rise from 0. Random draws depend on it, so a caller that
        spreads requests over several engines numbers them all.

        Raises RequestError for what can never run, PluginError where a logits processor fails on it."""
        key = self._adapters.key(options.adapter) if options.adapter else ""
        options = replace(options, adapter=key, cache_salt=_salt(options.cache_salt, key))
        sequences = self._requests.sequences(prompt_ids, params, options, number=number)
        request = sequences[0].request
        self.counters.prompt_tokens += len(request.prompt_ids)
        for seq in sequences:
            self._sequences[seq.uid] = seq
            if options.pooling is not None:
                self._pooler.enter(seq.uid)
            if request.params.grammar is None:
                self.scheduler.add(seq)
        if request.params.grammar is not None:
            self._grammars.add(sequences)
        return sequences

    def finish(self, uid: int, keep_len: int, reason: FinishReason) -> None:
        """End a sequence now, keeping keep_len tokens (a stop string ended there). Unknown uids are ignored."""
        if self._forget(uid):
            self.scheduler.finish(uid, keep_len, reason)

    def abort(self, uid: int) -> None:
        """The client is gone."""
        if self._forget(uid):
            self.scheduler.abort(uid)

    def _forget(self, uid: int) -> bool:
        """Whether the scheduler has the sequence and must be told that it is over."""
        if self._sequences.pop(uid, None) is None:
            return False
        self._results.forget(uid)
        self._pooler.leave(uid)
        if self._adapters.leaving:
            self._adapters.sweep(self._used_adapters())
        return self._grammars is None or not self._grammars.leave(uid)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences) or bool(self._launched)

    def reset_cache(self) -> bool:
        """Forget cached prefixes. False: this allocator cannot."""
        if not self.kv.stats().cached:
            return True
        try:
            self.kv.reset()
        except NotImplementedError:
            return False
        return True

    # Adapters.

    @property
    def adapters(self) -> Mapping[str, str]:
        """Those that requests may choose: name -> folder."""
        return self._adapters.names

    def load_adapter(self, name: str, folder: str) -> Future[None]:
        """Steps go on meanwhile. Raises RequestError, and so does the future where the folder does not fit."""
        return self._adapters.load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Requests that have it run to their end; new ones cannot choose it. RequestError for an unknown name."""
        self._adapters.unload(name, self._used_adapters())

    def _used_adapters(self) -> set[str]:
        return {seq.request.adapter for seq in self._sequences.values()}

    # Steps.

    def launch_delay(self) -> float:
        """Seconds for which the next call of `step` is to wait, while the device has enough to do: requests that come
        meanwhile are in the plan that it launches. 0 where nobody who came could be in it, where the time is not known,
        and without `engine.late_launch`."""
        if self._launch_timer is None or len(self._launched) != 1 or self._grammars:
            return 0.0
        return self._launch_timer.delay(time.perf_counter()) if len(self._sequences) < self.limits.max_seqs else 0.0

    def step(self) -> list[SequenceEvent]:
        """Launch one plan. Or take one result: when `depth` are in flight, nothing can be launched, or the newest plan
        waits for tokens that are still to come."""
        events = list(self._admissions())
        if len(self._launched) < self.composition.engine.depth and not (self._launched and self._launched[-1].waits):
            launched = self._launch()
            events += self._rejections()
            if launched:
                return events + self._complete()
        if self._launched:
            return events + self._take() + self._complete()
        if self._sequences and not events:
            self._wait_for_grammars()
        return events

    def _admissions(self) -> Iterable[SequenceEvent]:
        """Of requests that waited for their grammar."""
        if self._grammars is None or not self._grammars.compiling:
            return
        ready, refused = self._grammars.admitted()
        for seq in ready:
            self.scheduler.add(seq)
        for ended in refused:
            self._forget(ended.uid)
            yield ended_event(ended)

    def _launch(self) -> bool:
        began = time.perf_counter()
        engine = self.composition.engine
        ctx = SchedulerContext(self._steps, began, engine.seed, engine.depth, self.kv, self.cost)
        plan = self.scheduler.schedule(ctx)
        if plan is None:
            return False
        self._steps += 1
        if self._host_drafter is not None:
            plan.drafts = [
                HostDraft(row.slot, tuple(self._host_drafter.propose_host(self._sequences[row.uid].tokens, row.draft)))
                for row in plan.rows
                if row.draft
            ]
        if self._pooler:
            self._pooler.silence(plan)
        late = self._mark_late(plan) if self._grammars else {}
        blobs = self._enter(plan)
        decided = time.perf_counter()
        self.executor.submit(plan, blobs)
        self.counters.schedule_seconds += decided - began
        submitted = time.perf_counter()
        self.counters.submit_seconds += submitted - decided
        put_off = self._launch_timer is not None and self._launch_timer.launched(plan, submitted - began)
        self._launched.append(_Launched(plan, decided - began, late, bool(late), self._had_work, put_off))
        self._had_work = True
        return True

    def _enter(self, plan: StepPlan) -> Blobs:
        """What the ranks must know of sequences that join."""
        blobs = {}
        for join in plan.joins:
            seq = self._sequences[join.uid]
            slot = self._adapter_slot(seq) if seq.request.adapter else -1
            blobs[join.uid, join.epoch] = JoinBlob(tuple(seq.tokens), seq.request, seq.sample, slot)
            if seq.sample == 0 and seq.preemptions == 0:
                self.counters.entered_tokens += seq.prompt_len
                self.counters.cached_tokens += join.computed
        return blobs

    def _adapter_slot(self, seq: Sequence) -> int:
        slot = self._adapters.slots.slot(seq.uid)
        if slot < 0:
            name = type(self.scheduler).__name__
            raise RuntimeError(f"{name} let sequence {seq.uid} join, and it has not acquired its adapter's slot")
        return slot

    def _mark_late(self, plan: StepPlan) -> dict[int, int]:
        late = {}
        for i, row in enumerate(plan.rows):
            if row.flags & SAMPLE and row.uid in self._grammars:
                if row.draft:
                    name = type(self.scheduler).__name__
                    raise RuntimeError(f"{name} gave sequence {row.uid} {row.draft} drafts, and it has a grammar: 0")
                plan.rows[i] = row._replace(flags=row.flags | LATE)
                late[row.uid] = i
        return late

    def _rejections(self) -> Iterable[SequenceEvent]:
        for uid, reason in self.scheduler.take_rejected():
            self.finish(uid, 0, FinishReason.REJECTED)
            yield SequenceEvent(uid, (), reason=FinishReason.REJECTED, detail=reason)

    def _complete(self) -> list[SequenceEvent]:
        """Give the newest plan its masks, as soon as every token is known that they depend on."""
        if not self._launched or not self._launched[-1].waits:
            return []
        newest = self._launched[-1]
        if any(
            not newest.late.keys().isdisjoint(older.late) for older in islice(self._launched, len(self._launched) - 1)
        ):
            return []
        masks, over = self._grammars.masks(newest.late, others=len(newest.late) < len(newest.plan.rows))
        rows = tuple(newest.late[uid] for uid in masks)
        stacked = np.stack(list(masks.values())) if masks else np.zeros((0, 0), np.uint32)
        self.executor.complete(LateInputs(newest.plan.step, rows, stacked))
        newest.waits = False
        self.counters.late_rows += sum(uid in self._grammars for uid in newest.late) - len(rows) - len(over)
        for ended in over:
            self.finish(ended.uid, self._sequences[ended.uid].known_len, ended.reason)
        return [ended_event(ended) for ended in over]

    def _take(self) -> list[SequenceEvent]:
        began = time.perf_counter()
        result = self.executor.collect()
        came = time.perf_counter()
        self.counters.wait_seconds += came - began
        launched = self._launched.popleft()
        events, ended = self._results.take(launched.plan, result)
        self.scheduler.update(result)
        for uid, keep_len, reason in ended:
            self.finish(uid, keep_len, reason)
        self._record(launched, result)
        if self._launch_timer is not None:
            left = self._launched[0].plan if self._launched else None
            put_off = launched.put_off and launched.follows
            self._launch_timer.observe(launched.plan, result, put_off, came - began, came, left)
        self.counters.update_seconds += time.perf_counter() - came
        return events

    def _record(self, launched: _Launched, result: StepResult) -> None:
        plan = launched.plan
        counts = self.counters.finish_step(plan, result, self.info.lookahead)
        if launched.follows:
            self.counters.idle_seconds += result.idle_seconds
        self._had_work = self.has_work
        if not self.observers:
            return
        stats, kv = self.scheduler.stats(), self.kv.stats()
        record = StepRecord(
            step=result.step,
            clock=time.perf_counter(),
            rows=len(plan.rows),
            tokens=plan.num_tokens,
            sampled=counts.sampled,
            drafted=counts.drafted,
            accepted=counts.accepted,
            waiting=stats.waiting,
            running=stats.running,
            kv_used=kv.owned / kv.pages if kv.pages else 0.0,
            schedule_seconds=launched.schedule_seconds,
            device_seconds=result.device_seconds,
        )
        self.observers.step(record)

    def _wait_for_grammars(self) -> None:
        """Nothing else is left to do."""
        if self._grammars is None or not self._grammars.compiling:
            stats = self.scheduler.stats()
            raise RuntimeError(
                f"{type(self.scheduler).__name__} has {stats.waiting} waiting and {stats.running} running sequences "
                f"and launched nothing with an idle device ({self.kv.stats()})"
            )
        self._grammars.wait()


def _salt(given: str, adapter: str) -> str:
    """Of the prefix cache: an adapter's pages are its own, whatever salt a client gives."""
    return f"{adapter}\0{given}" if adapter or "\0" in given else given
