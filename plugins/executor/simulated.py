"""No device: tokens and the acceptance of drafts are made up, and a step takes the time that the cost model
predicts."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dovetail.core.engine.cost import bind_cost
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import (
    Blobs,
    CostModel,
    Drafter,
    Executor,
    ExecutorInfo,
    LateInputs,
    ModelSpec,
    Progress,
    Request,
    Row,
    RowResult,
    RowWork,
    StepPlan,
    StepResult,
    TokenLogprobs,
    VirtualClock,
)
from dovetail.core.interfaces.plan import DECODE, DECODE_AND_SAMPLE, LATE, SAMPLE
from dovetail.core.memory.sizing import group_layers, page_count, wanted_tokens
from dovetail.core.parallel.lockstep import Lockstep, StepTimes
from dovetail.core.parallel.slot_ledger import SlotLedger
from dovetail.plugins.executor.config import SimulatedConfig

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


_new = tuple.__new__
_A, _B, _C = 1_103_515_245, 2_654_435_761, 12_345
"""Coefficients of the made-up token that follows a token at a position."""


@dataclass(slots=True)
class _Slot:
    request: Request
    last: int
    """Last known token."""
    length: int = 0
    """Number of known tokens, once the prompt is fed."""


@dataclass(slots=True)
class _SimulatedStep:
    plan: StepPlan
    times: StepTimes | None
    """None = it runs in lanes, of which some have not launched it yet."""
    rows: tuple[RowResult, ...] = ()


class SimulatedExecutor(Executor):
    """Each token is a function of the previous token and the position, and never EOS: outputs end by length."""

    def __init__(self, config: SimulatedConfig, composition: Composition) -> None:
        self.config, self.composition = config, composition
        self._ledger = SlotLedger()
        self._steps: deque[_SimulatedStep] = deque()
        self._slots: dict[int, _Slot] = {}
        self._free_at: float | None = None
        """Time at which the device has run all plans; None = it has run none."""
        self._lockstep: Lockstep | None = None
        if config.clock == "virtual":
            self.clock = VirtualClock()
        if composition.lane is not None:
            assert isinstance(composition.lane.lockstep, Lockstep)  # lanes in processes are refused
            self._lockstep = composition.lane.lockstep

    def start(self, progress: Progress) -> ExecutorInfo:
        began = time.perf_counter()
        progress("read shapes", None)
        composition, engine = self.composition, self.composition.engine
        model = composition.part("model")
        model.target().source(model.config)  # Raises if the checkpoint is missing, as with a device.
        spec: ModelSpec = model.target().spec(model.config)
        self._vocab, self._hidden, self._ends = spec.vocab, spec.hidden, frozenset(spec.eos_ids)
        self._cost = bind_cost(composition, spec, "simulated")
        drafter: Drafter = composition.build("spec_decode")
        self._lookahead, self._drafter = drafter.lookahead, drafter
        self._follows = drafter.lookahead > 0 and drafter.window is not None
        if drafter.simulated_rates:
            raise ConfigError(
                "spec_decode.simulate_acceptance needs a device that verifies drafts, and executor=simulated makes up "
                "acceptance by executor.acceptance: set spec_decode.simulate_acceptance=null"
            )
        max_len = spec.longest(engine.max_len)
        # Nothing is stored, so there are no planes.
        groups = group_layers(spec.windows or (0,) * spec.layers, (), engine.page_size)
        wanted = wanted_tokens(
            groups, sequences=engine.max_seqs, max_len=max_len, ahead=engine.depth, budget=engine.token_budget
        )
        pages = {group.id: engine.kv_pages or page_count(group, wanted[group.id]) + engine.max_seqs for group in groups}
        cost = "no time" if self._cost is None else f"the time that cost={composition.part('cost').name} predicts"
        return ExecutorInfo(
            spec=spec,
            groups=groups,
            num_pages=pages,
            max_len=max_len,
            lookahead=self._lookahead,
            device="simulated",
            phases={"read shapes": time.perf_counter() - began},
            notes=(f"executor=simulated: tokens are made up, and a step takes {cost}", *self._more_notes()),
        )

    def _more_notes(self) -> Iterator[str]:
        if (rate := self.config.acceptance) is not None:
            yield f"executor=simulated: drafts are accepted at random, {rate:.0%} of them"
        if "experts" in self.composition.parts and (every := self.composition.build("experts").rebalance):
            yield f"executor=simulated: experts have equal loads, and experts.rebalance={every} moves none"

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        self._ledger.apply(plan)
        for join in plan.joins:
            blob = blobs[join.uid, join.epoch]
            self._slots[join.slot] = _Slot(blob.request, blob.tokens[-1])
        if self._cost is not None and self.clock.virtual:
            self.clock.wait_until(self.clock.now() + self._cost.launch_seconds(plan))
        self._steps.append(_SimulatedStep(plan, self._launched(plan)))
        if not plan.late:
            self._run({})

    def _launched(self, plan: StepPlan) -> StepTimes | None:
        """Enqueue the step on the simulated device, or on that of all lanes."""
        now, cost = self.clock.now(), self._cost
        if self._lockstep is not None:
            works = () if cost is None else tuple(cost.works(plan.rows))
            drafting = 0.0 if cost is None else self._draft_seconds(plan, cost)
            lanes = self._lockstep.launch(plan.step, now, (works, drafting))
            if lanes is not None:
                every, drafts = zip(*lanes, strict=True)
                seconds = 0.0 if cost is None else max(drafts) + cost.lanes_seconds(every)
                self._lockstep.run(plan.step, seconds / self.config.speed)
            return None
        seconds = 0.0 if cost is None else self._draft_seconds(plan, cost) + cost.seconds(plan)
        seconds /= self.config.speed
        free_at = now if self._free_at is None else self._free_at
        self._free_at = max(now, free_at) + seconds
        return StepTimes(self._free_at, seconds, max(now - free_at, 0.0))

    def _draft_seconds(self, plan: StepPlan, cost: CostModel) -> float:
        """Return the time of drafting, of the drafter's part in prompts, and of its earlier tokens."""
        seconds = 0.0
        if plan.catch_up:
            seconds = cost.catch_up_seconds(RowWork(one.count, one.first + one.count, 0) for one in plan.catch_up)
        if self._follows and plan.follows and plan.rows and not plan.rows[-1].flags & DECODE:
            seconds += cost.follow_seconds(RowWork.of(row) for row in plan.rows if not row.flags & DECODE)
        drafted = [row for row in plan.rows if row.draft] if self._lookahead else []
        if not drafted:
            return seconds
        decodes = sum(row.flags & DECODE != 0 for row in plan.rows)
        passes = self._drafter.passes(max(row.draft for row in drafted))
        return seconds + cost.draft_seconds(decodes, passes, max(row.bound for row in drafted))

    def complete(self, late: LateInputs) -> None:
        self._ledger.complete(late)
        # It makes up no tokens of drafts, so rows with masks verify none.
        self._run({row: masks[0] for row, masks in late.by_row().items()})

    def _run(self, masks: Mapping[int, np.ndarray]) -> None:
        """Compute the results of the newest plan; plans run in the order of a device."""
        step, slots, vocab, ends = self._steps[-1], self._slots, self._vocab, self._ends
        answers: list[RowResult] = []
        for i, row in enumerate(step.plan.rows):
            slot = slots[row[0]]
            if row[6] == DECODE_AND_SAMPLE and not row[5] and slot.request.params.logprobs is None:
                # Nearly every row. The same as `_answer`, with fewer calls.
                token = (slot.last * _A + slot.length * _B + _C) % vocab
                slot.last = token = token if token not in ends else self._follow(slot.last, slot.length, None)
                slot.length += 1
                answers.append(_new(RowResult, (i, row[1], row[2], (token,), (), (), None, 0)))
            else:
                answers.append(self._answer(i, row, masks.get(i)))
        step.rows = tuple(answers)

    def collect(self) -> StepResult:
        self._ledger.check_collect(len(self._steps))
        step = self._steps.popleft()
        times = step.times
        if times is None:
            assert self._lockstep is not None
            times = self._lockstep.take(step.plan.step)
        self.clock.wait_until(times.ready)
        return StepResult(step.plan.step, step.rows, times.seconds, times.idle)

    @property
    def pending(self) -> int:
        return len(self._steps)

    def shutdown(self) -> None:
        self._steps.clear()
        self._slots.clear()

    def _answer(self, index: int, row: Row, mask: np.ndarray | None) -> RowResult:
        slot, params = self._slots[row.slot], self._slots[row.slot].request.params
        tokens: tuple[int, ...] = ()
        drafts = 0 if row.flags & LATE else row.draft
        if row.flags & SAMPLE and (mask is not None or not row.flags & LATE):
            if not row.flags & DECODE:
                slot.length = row.bound
            tokens = self._sample(slot, min(drafts, self._drafter.depth), mask)
        if row.flags & DECODE and params.logprobs is None:
            return RowResult(index, row.uid, row.epoch, tokens, drafted=drafts)
        before = 0 if row.flags & DECODE else len(slot.request.prompt_ids) - 1 - (row.bound - row.count)
        return RowResult(
            index,
            row.uid,
            row.epoch,
            tokens,
            self._uniform(params.logprobs) * len(tokens),
            self._uniform(params.prompt_logprobs) * max(min(row.count, before), 0),
            self._pooled(slot.request, row),
            drafts,
        )

    def _sample(self, slot: _Slot, drafts: int, mask: np.ndarray | None) -> tuple[int, ...]:
        """Return the accepted ones of `drafts` drafts and one more token, and append them to the slot."""
        tokens: list[int] = []
        rate = self.config.acceptance or 0.0
        while True:
            accepted = len(tokens) < drafts and _coin(slot.last, slot.length) < rate
            slot.last = self._follow(slot.last, slot.length, mask)
            slot.length += 1
            tokens.append(slot.last)
            if not accepted:
                return tuple(tokens)

    def _pooled(self, request: Request, row: Row) -> np.ndarray | None:
        """Pool final hidden states of ones."""
        if request.pooling is None or (request.pooling == "last" and row.bound < len(request.prompt_ids)):
            return None
        return np.full(self._hidden, row.count if request.pooling == "mean" else 1, np.float32)

    def _follow(self, token: int, position: int, mask: np.ndarray | None) -> int:
        found = (token * _A + position * _B + _C) % self._vocab
        if mask is not None:
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._vocab])
            return int(allowed[found % len(allowed)])
        while found in self._ends:
            found = (found + 1) % self._vocab
        return found

    def _uniform(self, top: int | None) -> tuple[TokenLogprobs, ...]:
        """Return log-probabilities of a uniform distribution."""
        if top is None:
            return ()
        each = -math.log(self._vocab)
        return (TokenLogprobs(each, tuple((token, each) for token in range(top))),)


def _coin(token: int, position: int) -> float:
    """Return a number in [0, 1) that looks random: a hash by MurmurHash3's finalizer."""
    mixed = (token * 0x9E3779B1 + position * 0x85EBCA77) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ mixed >> shift) * factor & 0xFFFFFFFF
    return (mixed ^ mixed >> 16) / 2**32
