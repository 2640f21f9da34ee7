"""The step loop: schedule, submit, collect, update; up to `depth` plans in flight. One thread; tokens, no text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.core.engine.adapters import AdapterTable
from dovetail.core.engine.checks import check_fit, exact_lengths
from dovetail.core.engine.cost import bind_cost, other_gpu
from dovetail.core.engine.counters import Counters, Observers, StepTimes, step_record
from dovetail.core.engine.grammars import build_grammars
from dovetail.core.engine.host_drafts import host_drafts, late_inputs
from dovetail.core.engine.launch_timer import LaunchTimer
from dovetail.core.engine.limits import scheduler_limits
from dovetail.core.engine.pooling import clear_sample_flags
from dovetail.core.engine.progress import ProgressWatch
from dovetail.core.engine.requests import RequestBuilder, salted
from dovetail.core.engine.results import Results, SequenceEvent, ended_event
from dovetail.core.engine.tracked import GrammarState, Tracked
from dovetail.core.heap import freeze_heap, unfreeze_heap
from dovetail.core.host import detect_host
from dovetail.core.interfaces import (
    Blobs,
    Drafter,
    Executor,
    ExecutorInfo,
    FinishReason,
    JoinBlob,
    KVAllocator,
    Progress,
    RequestOptions,
    SamplingParams,
    Scheduler,
    SchedulerContext,
    Sequence,
    StepPlan,
    StepResult,
    StepShape,
)
from dovetail.core.interfaces.plan import LATE, SAMPLE
from dovetail.core.memory.page_ledger import PageLedger
from dovetail.core.memory.sizing import longest_alone, short_of_cache
from dovetail.core.recording.recorder import make_recorder, recording_path

if TYPE_CHECKING:
    from dovetail.core.compose import Composition
    from dovetail.core.parallel.lanes import Lanes
    from dovetail.core.parallel.lockstep import InlineLanes


_PLAIN = RequestOptions()


@dataclass(slots=True)
class _Launched:
    """A plan in flight."""

    plan: StepPlan
    schedule_seconds: float
    late: dict[int, int] = field(default_factory=dict)
    """uid -> index of its row, for rows that need a mask."""
    waits: bool = False
    """Whether the plan still waits for its late inputs."""
    follows: bool = False
    """The engine had work since the previous launch, so device idle time before this step was caused by the host."""
    delayed: bool = False
    """Whether the launch was delayed (Engine.launch_delay)."""


class Engine:
    """Rank 0's loop over one running executor. Made by `start_engine`."""

    def __init__(
        self,
        composition: Composition,
        executor: Any,
        info: ExecutorInfo,
        record: Path | None = None,
        lanes: Lanes | InlineLanes | None = None,
    ) -> None:
        """`executor`: an Executor that has started and described itself by `info`. `record`: new file to record to.
        `lanes`: the other lanes, with which it launches in lockstep; None = there are none."""
        engine = composition.engine
        self.composition, self.executor, self.info = composition, executor, info
        self.counters = Counters()
        self.kv: KVAllocator = composition.build("kv_cache", groups=info.groups, num_pages=info.num_pages)
        drafter: Drafter = composition.build("spec_decode")
        self.limits = scheduler_limits(engine, info, drafter)
        self.scheduler: Scheduler = composition.build("scheduler", limits=self.limits, kv=self.kv)
        here = None if info.device == "simulated" else detect_host(engine.device)
        self.cost = bind_cost(composition, info.spec, info.device, here)
        self.clock = self._now = executor.clock.now
        """Source of request arrival times and of SchedulerContext.clock, in seconds."""
        self._ledger = PageLedger(info.groups, info.num_pages, engine.max_seqs, info.lookahead)
        self._progress = ProgressWatch(self.limits)
        longest = longest_alone(self.kv, self.limits)
        more_notes = (*short_of_cache(longest, info.max_len), *other_gpu(composition, info.device))
        self.info = replace(info, notes=(*info.notes, *more_notes))
        self._requests = RequestBuilder(composition, info.spec, info.max_len, longest)
        self._adapters = AdapterTable(executor, info.adapter_slots)
        if info.adapter_slots:
            self.scheduler.resources = (self._adapters.slots,)
            self._adapters.load_first(composition)
        self._host_drafter = drafter if drafter.needs_host_tokens else None
        parts = composition.many("observer") if "observer" in composition.parts else {}
        self.observers = Observers({name: part.build() for name, part in parts.items()})
        self._tracked: dict[int, Tracked] = {}
        """Unfinished sequences by uid."""
        self._embeddings = 0
        """Number of tracked sequences that are embedded."""
        self._launched: deque[_Launched] = deque()
        self._launch_timer = LaunchTimer() if engine.late_launch else None
        self._steps = 0
        self._had_work = False
        """Whether the engine had work since the last launch."""
        # A row that skips a step is shorter than plans in flight assume, which backends with exact lengths cannot take.
        patient = engine.depth > 1 and exact_lengths(composition)
        self._grammars = build_grammars(composition, info.spec, patient=patient, drafts=info.lookahead > 0)
        self._results = Results(self._tracked, self._grammars)
        self._recorder = make_recorder(record, composition, info, self.limits, self.scheduler, self._now)
        self._lanes = lanes

    def interrupt(self) -> None:
        """Interrupt a step that hangs. Call it from another thread than `step`; only `shutdown` may follow."""
        self.executor.interrupt()

    def shutdown(self) -> None:
        unfreeze_heap()
        self.observers.close()
        self._recorder.close()
        if self._grammars is not None:
            self._grammars.close()
        self.executor.shutdown()
        if self._lanes is not None:
            self._lanes.close()

    def add(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        options: RequestOptions = _PLAIN,
        *,
        number: int | None = None,
    ) -> list[Sequence]:
        """Queue a request and return its n sequences. With a grammar it is queued once that is compiled; if it cannot
        be, the next events of its sequences carry the reason. With `options.pooling` the prompt is embedded and
        `params` ignored. `number` identifies the request; by default numbers rise from 0. Random draws depend on it, so
        a caller that spreads requests over several engines numbers them all. Raises RequestError for what can never
        run, PluginError if a logits processor fails on the request."""
        key = self._adapters.key(options.adapter) if options.adapter else ""
        options = replace(options, adapter=key, cache_salt=salted(options.cache_salt, key))
        sequences = self._requests.sequences(prompt_ids, params, options, number=number, arrival=self.clock())
        request = sequences[0].request
        self.counters.prompt_tokens += len(request.prompt_ids)
        tracked = [Tracked(seq) for seq in sequences]
        self._tracked.update((one.seq.uid, one) for one in tracked)
        if options.pooling is not None:
            self._embeddings += len(tracked)
        if request.params.grammar is not None:
            self._grammars.add(tracked)
        else:
            self._queue(sequences)
        return sequences

    def _queue(self, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            self.scheduler.add(seq)
            self._recorder.added(seq)

    def finish(self, uid: int, keep_len: int, reason: FinishReason) -> None:
        """End a sequence now, keeping keep_len tokens, such as those up to a stop string. Ignores unknown uids."""
        if self._forget(uid):
            self._recorder.ended(uid, keep_len, reason)
            self.scheduler.finish(uid, keep_len, reason)

    def abort(self, uid: int) -> None:
        """Drop a cancelled sequence. Ignores unknown uids."""
        if self._forget(uid):
            self._recorder.ended(uid, 0, FinishReason.ABORT)
            self.scheduler.abort(uid)

    def _forget(self, uid: int) -> bool:
        """Drop the engine's record of a sequence. Return whether the scheduler also has the sequence."""
        tracked = self._tracked.pop(uid, None)
        if tracked is None:
            return False
        if tracked.seq.request.pooling is not None:
            self._embeddings -= 1
        if self._adapters.unloading:
            self._adapters.unload_unused(self._used_adapters())
        if self._grammars is None:
            return True
        self._grammars.leave(tracked)
        return tracked.compiling is None

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do: for its own sequences, or for those of other lanes."""
        return bool(self._tracked) or bool(self._launched) or (self._lanes is not None and self._lanes.awake)

    def reset_cache(self) -> bool:
        """Drop cached prefixes. False = this allocator cannot."""
        if not self.kv.stats().cached:
            return True
        try:
            self.kv.reset()
            self._recorder.emptied()
        except NotImplementedError:
            return False
        return True

    @property
    def adapters(self) -> Mapping[str, str]:
        """Adapters that requests may choose: name -> folder."""
        return self._adapters.names

    def load_adapter(self, name: str, folder: str) -> Future[None]:
        """Read an adapter while steps go on. Raises RequestError, and so does the future if the folder does not fit."""
        return self._adapters.load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Unload for new requests; current users run to their end. Raises RequestError for an unknown name."""
        self._adapters.unload(name, self._used_adapters())

    def _used_adapters(self) -> set[str]:
        return {tracked.seq.request.adapter for tracked in self._tracked.values()}

    def launch_delay(self) -> float:
        """Seconds to delay the next `step`: the device is busy until then, and requests that arrive still make it into
        the plan. 0 if no request could join, if the step time is unknown, and without `engine.late_launch`."""
        if self._launch_timer is None or len(self._launched) != 1 or self._follows_grammars:
            return 0.0
        return self._launch_timer.delay(self._now()) if len(self._tracked) < self.limits.max_seqs else 0.0

    @property
    def _follows_grammars(self) -> bool:
        return self._grammars is not None and self._grammars.running > 0

    def step(self) -> list[SequenceEvent]:
        """Launch one plan. Take one result instead if `depth` plans are in flight, if nothing can be launched, or if
        the newest plan waits for tokens of an older one."""
        events = list(self._enter_compiled())
        if len(self._launched) < self.composition.engine.depth and not (self._launched and self._launched[-1].waits):
            launched = self._launch()
            events += self._rejections()
            if launched:
                return events + self._complete()
        if self._launched:
            return events + self._take() + self._complete()
        if self._tracked and not events:
            self._wait_for_grammars()
        return events

    def _enter_compiled(self) -> Iterable[SequenceEvent]:
        """Hand sequences whose grammar is compiled to the scheduler; yield the end of those whose grammar failed."""
        if self._grammars is None or not self._grammars.compiling:
            return
        ready, refused = self._grammars.compiled()
        self._queue(ready)
        for ended in refused:
            self._forget(ended.uid)
            yield ended_event(ended)

    def _launch(self) -> bool:
        began = self._now()
        engine = self.composition.engine
        ctx = SchedulerContext(self._steps, self.clock(), engine.seed, engine.depth, self.kv, self.cost)
        plan = self.scheduler.schedule(ctx)
        if plan is None:
            self._recorder.planned(ctx, None)
            return self._serve_lanes()
        self._steps += 1
        if self._host_drafter is not None or self._follows_grammars:
            in_flight = (launched.plan for launched in self._launched)
            plan.drafts = host_drafts(plan, self._tracked, list(in_flight), self._host_drafter)
        if self._embeddings:
            clear_sample_flags(plan, self._tracked)
        late = self._mark_late(plan) if self._follows_grammars else {}
        self._check(plan, bool(late))
        blobs = self._join_blobs(plan)
        if self._lanes is not None:
            own, caught_up = StepShape.of(plan.rows, follows=plan.follows), sum(one.count for one in plan.catch_up)
            plan.shape = self._lanes.agree(own._replace(caught_up=caught_up), active=True)
        decided = self._now()
        self.executor.submit(plan, blobs)
        self.counters.schedule_seconds += decided - began
        submitted = self._now()
        self.counters.submit_seconds += submitted - decided
        self._recorder.planned(ctx, plan, decided - began, submitted - decided)
        delayed = self._launch_timer is not None and self._launch_timer.launched(plan, submitted - began)
        self._launched.append(_Launched(plan, decided - began, late, bool(late), self._had_work, delayed))
        self._had_work = True
        return True

    def _serve_lanes(self) -> bool:
        """Launch a plan without rows if other lanes have some. Return whether one was launched."""
        if self._lanes is None or not self._lanes.awake:
            return False
        shape = self._lanes.agree(StepShape.of(()), active=bool(self._tracked))
        if shape is None or not shape.tokens:
            return False
        plan = StepPlan(self._steps, [], shape=shape)
        self._steps += 1
        self.executor.submit(plan, {})
        self._launched.append(_Launched(plan, 0.0))
        return True

    def _check(self, plan: StepPlan, waits: bool) -> None:
        """Raise PluginError for a plan that would write to a page with several owners, and for endless plans."""
        joined = {join.uid: self._tracked[join.uid].seq for join in plan.joins}
        if (fault := self._ledger.apply(plan, joined)) is not None:
            raise self.composition.part("kv_cache").fault(f"step {plan.step}: {fault}")
        if (fault := self._progress.launched(plan, self._tracked, waits)) is not None:
            raise self.composition.part("scheduler").fault(f"{fault} ({self.scheduler.stats()}, {self.kv.stats()})")

    def _join_blobs(self, plan: StepPlan) -> Blobs:
        """Return the data that the ranks need for the plan's joins."""
        blobs = {}
        for join in plan.joins:
            seq = self._tracked[join.uid].seq
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
            raise RuntimeError(f"{name} let sequence {seq.uid} join without acquiring its adapter's slot")
        return slot

    def _mark_late(self, plan: StepPlan) -> dict[int, int]:
        """Flag the rows that need a mask. Return uid -> index of its row."""
        late = {}
        for i, row in enumerate(plan.rows):
            if row.flags & SAMPLE and (one := self._tracked.get(row.uid)) is not None and one.grammar is not None:
                plan.rows[i] = row._replace(flags=row.flags | LATE)
                late[row.uid] = i
        return late

    def _rejections(self) -> Iterable[SequenceEvent]:
        for uid, reason in self.scheduler.take_rejected():
            self.finish(uid, 0, FinishReason.REJECTED)
            yield SequenceEvent(uid, (), reason=FinishReason.REJECTED, detail=reason)

    def _complete(self) -> list[SequenceEvent]:
        """Give the newest plan its masks once every token that they depend on is known."""
        if not self._launched or not self._launched[-1].waits:
            return []
        newest = self._launched[-1]
        if any(
            not newest.late.keys().isdisjoint(older.late) for older in islice(self._launched, len(self._launched) - 1)
        ):
            return []
        states = self._grammar_states(newest.late)
        guesses = self._guesses(newest)
        masks, over = self._grammars.masks(states, len(newest.late) < len(newest.plan.rows), guesses)
        self.executor.complete(late_inputs(newest.plan.step, newest.late, masks))
        newest.waits = False
        self.counters.late_rows += len(states) - len(masks) - len(over)
        for ended in over:
            self.finish(ended.uid, self._tracked[ended.uid].seq.known_len, ended.reason)
        return [ended_event(ended) for ended in over]

    def _guesses(self, newest: _Launched) -> dict[int, tuple[int, ...]]:
        """Return the drafts of the rows that need masks, by uid."""
        if not any(newest.plan.rows[at].draft for at in newest.late.values()):
            return {}
        found = self.executor.drafted()
        return {uid: found[at] for uid, at in newest.late.items() if at in found}

    def _grammar_states(self, uids: Iterable[int]) -> dict[int, GrammarState]:
        """Return the states of those sequences that have not ended."""
        tracked = ((uid, self._tracked.get(uid)) for uid in uids)
        return {uid: one.grammar for uid, one in tracked if one is not None and one.grammar is not None}

    def _take(self) -> list[SequenceEvent]:
        began = self._now()
        result = self.executor.collect()
        arrived = self._now()
        self.counters.wait_seconds += arrived - began
        launched = self._launched.popleft()
        if not launched.plan.rows:
            return []
        events, ended = self._results.take(launched.plan, result)
        self.scheduler.update(result)
        self._recorder.resulted(result, arrived)
        for uid, keep_len, reason in ended:
            self.finish(uid, keep_len, reason)
        self._record(launched, result, bool(ended))
        if self._launch_timer is not None:
            running = self._launched[0].plan if self._launched else None
            delayed = launched.delayed and launched.follows
            self._launch_timer.observe(launched.plan, result, delayed, arrived - began, arrived, running)
        self.counters.update_seconds += self._now() - arrived
        return events

    def _record(self, launched: _Launched, result: StepResult, ended: bool) -> None:
        plan = launched.plan
        counts = self.counters.finish_step(plan, result, self.info.lookahead)
        if counts.sampled or ended:
            self._progress.progressed()
        if launched.follows:
            self.counters.idle_seconds += result.idle_seconds
        self._had_work = self.has_work
        if not self.observers:
            return
        times = StepTimes(self._now(), launched.schedule_seconds)
        self.observers.step(step_record(plan, result, counts, times, self.scheduler.stats(), self.kv.stats()))

    def _wait_for_grammars(self) -> None:
        """Wait briefly for a grammar to compile: the engine has nothing else to do."""
        if self._grammars is None or not self._grammars.compiling:
            stats = self.scheduler.stats()
            raise self.composition.part("scheduler").fault(
                f"it has {stats.waiting} waiting and {stats.running} running sequences and launched nothing with an "
                f"idle device ({self.kv.stats()})"
            )
        self._grammars.wait()


def start_engine(
    composition: Composition,
    progress: Progress = lambda phase, share: None,
    *,
    again: bool = False,
    lanes: Lanes | InlineLanes | None = None,
) -> Engine:
    """Check that the parts fit each other, then load everything. Releases everything if that fails. `again`: the engine
    replaces one that ended. `lanes`: see Engine."""
    check_fit(composition)
    record = recording_path(composition, again=again)
    executor: Executor = composition.build("executor", composition=composition)
    try:
        engine = Engine(composition, executor, executor.start(progress), record, lanes)
        freeze_heap()
        return engine
    except BaseException:
        executor.shutdown()
        raise
