"""The step loop: schedule, submit, collect, update, with up to `depth` plans in flight. One thread; tokens, no text."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dovetail.core.engine.adapters import AdapterTable, check_folders
from dovetail.core.engine.capacity import check_weights_fit
from dovetail.core.engine.cost import bind_cost
from dovetail.core.engine.grammars import Ended, Grammars
from dovetail.core.engine.intake import Intake
from dovetail.core.engine.pooling import Pooler
from dovetail.core.errors import CapabilityError, RequestError
from dovetail.core.interfaces import (
    Drafter,
    FinishReason,
    HostDraft,
    JoinBlob,
    LateInputs,
    Model,
    Observer,
    Pooling,
    Progress,
    Row,
    RowFlag,
    RowResult,
    SamplingParams,
    SchedulerContext,
    SchedulerLimits,
    Sequence,
    StepPlan,
    StepRecord,
    StepResult,
    TokenLogprobs,
    Vocabulary,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.core.compose import Composition, Host

log = logging.getLogger(__name__)

DECODE, SAMPLE, LATE = int(RowFlag.DECODE), int(RowFlag.SAMPLE), int(RowFlag.LATE)
"""Plain numbers: `&` of an enum costs half a microsecond, and a step asks every row."""
_DRAFT, _TOKENS = itemgetter(Row._fields.index("draft")), itemgetter(RowResult._fields.index("tokens"))
_new = tuple.__new__


class SequenceEvent(NamedTuple):
    """News of one sequence after a step."""

    uid: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    reason: FinishReason | None = None
    detail: str = ""
    """Why a rejected sequence was rejected."""
    pooled_C: NDArray[np.float32] | None = None
    """Of a prompt that is embedded; it ends with it."""


@dataclass(slots=True)
class Counters:
    """Since start. Written by the engine."""

    steps: int = 0
    prompt_tokens: int = 0
    entered_tokens: int = 0
    """Prompt tokens of requests that have entered the device: each request once, at its first entry."""
    cached_tokens: int = 0
    """Of entered_tokens, those found in the prefix cache."""
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    decode_rows: int = 0
    """Rows that could have verified drafts; output per such row is the acceptance length."""
    late_rows: int = 0
    """Rows that sat a step out because their mask came late."""
    schedule_seconds: float = 0.0
    """Host time to decide plans."""
    submit_seconds: float = 0.0
    """Host time to hand plans to the executor; with a synchronous device also the time of the device."""
    wait_seconds: float = 0.0
    """Time in which the host had nothing to do but wait for a result."""
    update_seconds: float = 0.0
    """Host time to take results in."""
    device_seconds: float = 0.0
    """Time the device was at work, where the executor can tell."""
    idle_seconds: float = 0.0
    """Time for which the device had nothing to do while there were requests: it waited for the host."""


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


class Engine:
    """Built from a composition; call `start` before anything else."""

    def __init__(self, composition: Composition) -> None:
        self.composition = composition
        self.counters = Counters()
        self._sequences: dict[int, Sequence] = {}
        self._launched: deque[_Launched] = deque()
        self._prompt_logprobs: dict[int, tuple[int, int, int]] = {}
        """uid -> (epoch, prompt positions reported in it, positions ever reported): a preempted prompt is fed again."""
        self._pooler = Pooler()
        self._steps = 0
        self._had_work = False
        """Since the plan launched last."""
        self._exact_lengths = False
        """Attention plans from lengths that the host knows."""

    def start(self, progress: Progress = lambda phase, share: None) -> None:
        """Check that the parts fit each other, then load everything; errors surface here."""
        composition, engine = self.composition, self.composition.engine
        self._check_fit()
        self.executor = composition.build("executor", composition=composition)
        try:
            info = self.info = self.executor.start(progress)
            self.kv = composition.build("kv_cache", groups=info.groups, num_pages=info.num_pages)
            self.limits = SchedulerLimits(
                engine.token_budget, engine.max_seqs, info.max_len, info.lookahead, engine.depth
            )
            self.scheduler = composition.build("scheduler", limits=self.limits, kv=self.kv)
            self._adapters = self._load_adapters()
            self.cost = bind_cost(composition, info.spec, info.device)
            self._host_drafter = self._build_host_drafter()
            self._intake = Intake(composition, info.spec, info.max_len)
            observers = composition.many("observer") if "observer" in composition.parts else {}
            self.observers: dict[str, Observer] = {name: part.build() for name, part in observers.items()}
            self._grammars = self._build_grammars()
        except BaseException:
            self.executor.shutdown()
            raise

    def _load_adapters(self) -> AdapterTable | None:
        if not self.info.adapter_slots:
            return None
        adapters = AdapterTable(self.executor, self.info.adapter_slots)
        self.scheduler.resources = (adapters.slots,)
        part = self.composition.part("adapter")
        loading = [adapters.load(name, folder) for name, folder in part.target().initial(part.config).items()]
        for future in loading:
            future.result()
        return adapters

    def _build_grammars(self) -> Grammars | None:
        composition, spec = self.composition, self.info.spec
        if "grammar" not in composition.parts:
            return None
        model = composition.part("model")
        folder = model.target().source(model.config).folder
        tokenizer = folder / "tokenizer.json" if folder is not None else None
        vocabulary = Vocabulary(
            spec.vocab, spec.eos_ids, tokenizer if tokenizer is not None and tokenizer.is_file() else None
        )
        compiler = composition.build("grammar", vocabulary=vocabulary)
        # A row that sits a step out is shorter than a plan in flight counts on: no good where the host's count decides.
        patient = self._exact_lengths and composition.engine.depth > 1
        return Grammars(compiler, vocabulary, threading.TIMEOUT_MAX if patient else composition.engine.mask_wait)

    def _build_host_drafter(self) -> Drafter | None:
        drafter: Drafter = self.composition.build("spec_decode")
        if not drafter.needs_host_tokens:
            return None
        if self.composition.engine.depth > 1:
            name = type(drafter).__name__
            raise CapabilityError(
                [f"{name} drafts from tokens on the host, which come late at engine.depth > 1: set engine.depth=1"]
            )
        return drafter

    def _check_fit(self) -> None:
        """Of the parts to each other, and of the weights into memory."""
        from dovetail.core.engine import host

        model = self.composition.part("model")
        spec = model.target().spec(model.config)
        here = host.detect_host(self.composition.engine.device)
        self.composition.check(here, host.model_facts(spec))
        self._check_lengths(here)
        self._check_halves()
        check_weights_fit(self.composition, spec, here)
        check_folders(self.composition)

    def _check_lengths(self, here: Host) -> None:
        """Drafts in flight leave the host with bounds of lengths, which some attention backends cannot plan from."""
        composition, depth = self.composition, self.composition.engine.depth
        attention, drafter = composition.part("attention"), composition.part("spec_decode")
        self._exact_lengths = attention.capabilities(here).provides.get("exact_lengths") == "host"
        if self._exact_lengths and depth > 1 and composition.build("spec_decode").lookahead:
            raise CapabilityError(
                [
                    f"attention={attention.name} plans from exact lengths on the host, which come late where drafts "
                    f"are in flight (spec_decode={drafter.name}, engine.depth={depth}). "
                    "Would work: engine.depth=1, spec_decode=none."
                ]
            )

    def _check_halves(self) -> None:
        """A step's halves can take turns only where the model hands out its collective calls."""
        model = self.composition.part("model")
        if self.composition.engine.overlap_tokens and model.target().layers is Model.layers:
            raise CapabilityError(
                [
                    f"model={model.name} makes its collective calls by itself (it has no `layers`), and "
                    "engine.overlap_tokens runs a step as two halves in turns. Would work: engine.overlap_tokens=0."
                ]
            )

    def shutdown(self) -> None:
        for name, observer in getattr(self, "observers", {}).items():
            self._close(name, observer)
        if (grammars := getattr(self, "_grammars", None)) is not None:
            grammars.close()
        if hasattr(self, "executor"):
            self.executor.shutdown()

    # Requests.

    def add(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline: float | None = None,
        user: str = "",
        cache_salt: str = "",
        hints: Mapping[str, float] | None = None,
        pooling: Pooling | None = None,
        number: int | None = None,
        adapter: str = "",
    ) -> list[Sequence]:
        """Queue a request; its n sequences. Raises RequestError for what can never run, PluginError where a logits
        processor fails on it. One with a grammar is queued once that is compiled; if it cannot be, the sequences' next
        events say why. With `pooling` the prompt is embedded, and nothing of params counts. `number`: rises from 0
        unless given; random draws depend on it, so who spreads requests over several engines numbers them all."""
        key = self._adapter_table().key(adapter) if adapter else ""
        sequences = self._intake.sequences(
            prompt_ids,
            params,
            priority=priority,
            deadline=deadline,
            user=user,
            cache_salt=_salt(cache_salt, key),
            adapter=key,
            hints=hints,
            pooling=pooling,
            number=number,
        )
        request = sequences[0].request
        self.counters.prompt_tokens += len(request.prompt_ids)
        for seq in sequences:
            self._sequences[seq.uid] = seq
            if pooling is not None:
                self._pooler.enter(seq.uid)
            if request.params.grammar is None:
                self.scheduler.add(seq)
        if request.params.grammar is not None:
            self._grammars.add(sequences)
        return sequences

    # Adapters.

    @property
    def adapters(self) -> Mapping[str, str]:
        """Those that requests may choose: name -> folder."""
        return {} if self._adapters is None else self._adapters.names

    def load_adapter(self, name: str, folder: str) -> Future[None]:
        """Steps go on meanwhile. Raises RequestError, and so does the future where the folder does not fit."""
        return self._adapter_table().load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Requests that have it run to their end; new ones cannot choose it. RequestError for an unknown name."""
        self._adapter_table().unload(name, self._used_adapters())

    def _adapter_table(self) -> AdapterTable:
        if self._adapters is None:
            raise RequestError("adapter: this engine has none (adapter=none); adapter=lora serves some", status=404)
        return self._adapters

    def _used_adapters(self) -> set[str]:
        return {seq.request.adapter for seq in self._sequences.values()}

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
        self._prompt_logprobs.pop(uid, None)
        self._pooler.leave(uid)
        if self._adapters is not None and self._adapters.leaving:
            self._adapters.sweep(self._used_adapters())
        return self._grammars is None or not self._grammars.leave(uid)

    def reset_cache(self) -> bool:
        """Forget cached prefixes. False: this allocator cannot."""
        if not self.kv.stats().cached:
            return True
        try:
            self.kv.reset()
        except NotImplementedError:
            return False
        return True

    @property
    def has_work(self) -> bool:
        return bool(self._sequences) or bool(self._launched)

    # Steps.

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
            events += self._take()
            events += self._complete()
        elif self._sequences and not events:
            if self._grammars is not None and self._grammars.compiling:
                self._grammars.wait()
                return events
            stats = self.scheduler.stats()
            raise RuntimeError(
                f"{type(self.scheduler).__name__} has {stats.waiting} waiting and {stats.running} running sequences "
                f"and launched nothing with an idle device ({self.kv.stats()})"
            )
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
            yield _event(ended)

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
        blobs = {}
        for join in plan.joins:
            seq = self._sequences[join.uid]
            slot = self._adapter_slot(seq) if seq.request.adapter else -1
            blobs[join.uid, join.epoch] = JoinBlob(tuple(seq.tokens), seq.request, seq.sample, slot)
            if seq.sample == 0 and seq.preemptions == 0:
                self.counters.entered_tokens += seq.prompt_len
                self.counters.cached_tokens += join.computed
        decided = time.perf_counter()
        self.executor.submit(plan, blobs)
        self.counters.schedule_seconds += decided - began
        self.counters.submit_seconds += time.perf_counter() - decided
        self._launched.append(_Launched(plan, decided - began, late, bool(late), follows=self._had_work))
        self._had_work = True
        return True

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
        return [_event(ended) for ended in over]

    def _rejections(self) -> Iterable[SequenceEvent]:
        for uid, reason in self.scheduler.take_rejected():
            self.finish(uid, 0, FinishReason.REJECTED)
            yield SequenceEvent(uid, (), reason=FinishReason.REJECTED, detail=reason)

    def _take(self) -> list[SequenceEvent]:
        began = time.perf_counter()
        result = self.executor.collect()
        came = time.perf_counter()
        self.counters.wait_seconds += came - began
        launched = self._launched.popleft()
        events: list[SequenceEvent] = []
        ended: list[tuple[int, int, FinishReason]] = []
        sequence, grammars = self._sequences.get, self._grammars or ()
        for row in result.rows:
            _, uid, _, tokens, logprobs, prompt_logprobs, _ = row
            seq = sequence(uid)
            if seq is None:
                continue
            known = seq.tokens
            if (
                tokens
                and not prompt_logprobs
                and uid not in grammars
                and seq.request.stop_ids.isdisjoint(tokens)
                and len(known) + len(tokens) < seq.limit
            ):
                # It goes on, as nearly all do: as `_extend`, without a Python frame for each row.
                known += tokens
                events.append(_new(SequenceEvent, (uid, tokens, logprobs, (), None, "", None)))
                continue
            if tokens or prompt_logprobs:
                event = self._extend(seq, row)
            elif row.pooled_C is not None and (
                (pooled_C := self._pooler.add(seq, launched.plan.rows[row.row], row)) is not None
            ):
                event = SequenceEvent(seq.uid, (), reason=FinishReason.STOP, pooled_C=pooled_C)
            else:
                continue
            events.append(event)
            if event.reason is not None:
                ended.append((seq.uid, seq.known_len - len(row.tokens) + len(event.tokens), event.reason))
        self.scheduler.update(result)
        for uid, keep_len, reason in ended:
            self.finish(uid, keep_len, reason)
        self._record(launched, result)
        self.counters.update_seconds += time.perf_counter() - came
        return events

    def _extend(self, seq: Sequence, row: RowResult) -> SequenceEvent:
        """Append what came; the event shows what stands up to the first token that ends the sequence (`finish` drops
        the rest)."""
        request, tokens, limit = seq.request, row.tokens, seq.limit
        stop_ids, grammar = request.stop_ids, request.params.grammar
        length = len(seq.tokens)
        reason, detail, kept, logprobs = None, "", tokens, row.logprobs
        for token in tokens:
            length += 1
            if token in stop_ids and length > len(request.prompt_ids) + request.params.min_tokens:
                reason = FinishReason.STOP
            elif grammar is not None and (over := self._grammars.advance(seq.uid, token)) is not None:
                reason, detail = over.reason, over.detail
            elif length >= limit:
                reason = FinishReason.LENGTH
            if reason is not None:
                kept = tokens[: length - len(seq.tokens)]
                logprobs = logprobs[: len(kept)]
                break
        seq.tokens += tokens
        prompt_logprobs = self._new_prompt_logprobs(row) if row.prompt_logprobs else ()
        return SequenceEvent(seq.uid, kept, logprobs, prompt_logprobs, reason, detail)

    def _new_prompt_logprobs(self, row: RowResult) -> tuple[TokenLogprobs, ...]:
        epoch, position, reported = self._prompt_logprobs.get(row.uid, (row.epoch, 0, 0))
        if epoch != row.epoch:
            position = 0
        new = row.prompt_logprobs[max(reported - position, 0) :]
        position += len(row.prompt_logprobs)
        self._prompt_logprobs[row.uid] = (row.epoch, position, max(reported, position))
        return new

    def _record(self, launched: _Launched, result: StepResult) -> None:
        plan, counters = launched.plan, self.counters
        # They come first. What follows is one pass in C each: a step asks every row.
        decodes = bisect_left(plan.rows, True, key=lambda row: not row.flags & DECODE)
        drafted = sum(map(_DRAFT, plan.rows)) if self.info.lookahead else 0
        accepted = sum(max(len(row.tokens) - 1, 0) for row in result.rows[:decodes]) if drafted else 0
        sampled = sum(map(len, map(_TOKENS, result.rows)))
        counters.steps += 1
        counters.output_tokens += sampled
        counters.drafted += drafted
        counters.accepted += accepted
        counters.decode_rows += decodes
        counters.device_seconds += result.device_seconds
        if launched.follows:
            counters.idle_seconds += result.idle_seconds
        self._had_work = self.has_work
        if not self.observers:
            return
        stats, kv = self.scheduler.stats(), self.kv.stats()
        record = StepRecord(
            step=result.step,
            clock=time.perf_counter(),
            rows=len(plan.rows),
            tokens=plan.num_tokens,
            sampled=sampled,
            drafted=drafted,
            accepted=accepted,
            waiting=stats.waiting,
            running=stats.running,
            kv_used=kv.owned / kv.pages if kv.pages else 0.0,
            schedule_seconds=launched.schedule_seconds,
            device_seconds=result.device_seconds,
        )
        for name, observer in list(self.observers.items()):
            try:
                observer.step(record)
            except Exception:
                log.exception("observer %s failed and was removed", name)
                self._close(name, self.observers.pop(name))

    @staticmethod
    def _close(name: str, observer: Observer) -> None:
        """Its failure is reported and stops nothing."""
        try:
            observer.close()
        except Exception:
            log.exception("observer %s failed to close", name)


def _salt(given: str, adapter: str) -> str:
    """Of the prefix cache: an adapter's pages are its own, whatever salt a client gives."""
    return f"{adapter}\0{given}" if adapter or "\0" in given else given


def _event(ended: Ended) -> SequenceEvent:
    return SequenceEvent(ended.uid, (), reason=ended.reason, detail=ended.detail)
