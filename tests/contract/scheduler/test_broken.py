"""Schedulers with one fault each; the suite must reject them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest

from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.interfaces import (
    FinishReason,
    Row,
    RowFlag,
    SchedulerContext,
    SchedulerLimits,
    Sequence,
    StepPlan,
    StepResult,
)
from dovetail.core.testing.scheduler import SchedulerContract
from dovetail.core.testing.suite import failures

from ..faults import each, rejects, suite, variant

CHAOS = random.Random()


fault = partial(variant, PolicyScheduler)


class Greedy(PolicyScheduler):
    """Exceeds the token budget."""

    def schedule(self, ctx: SchedulerContext) -> StepPlan | None:
        self.limits = SchedulerLimits(100, self.limits.max_seqs, self.limits.max_len, self.limits.lookahead)
        return super().schedule(ctx)


class Forgetful(PolicyScheduler):
    """Keeps the pages of sequences that ended."""

    def finish(self, uid: int, keep_len: int, reason: FinishReason) -> None:
        seq = self._sequences.get(uid)
        if seq is not None and self.kv.stats().owned < 20:
            self.kv.release = lambda seq: None  # type: ignore[method-assign]
        super().finish(uid, keep_len, reason)


class Amnesiac(PolicyScheduler):
    """Loses the tokens that arrived while a sequence was being preempted."""

    def update(self, result: StepResult) -> None:
        plan = self._launched[0]
        super().update(result)
        for row in plan.rows:
            seq = self._sequences.get(row.uid)
            if seq is not None and seq.epoch != row.epoch and seq.known_len > seq.prompt_len:
                seq.tokens.pop()
                seq.max_len -= 1


class Overtaken(PolicyScheduler):
    """Lets a preempted sequence re-enter while its results are still pending."""

    def _candidates(self, step, ctx):  # type: ignore[no-untyped-def]
        yield from list(self.resuming.values())
        yield from list(self.waiting.values())


class Confident(PolicyScheduler):
    """Assumes that every sampling row yields a token."""

    def update(self, result: StepResult) -> None:
        super().update(result)
        for row, outcome in zip(self.plan_of(result).rows, result.rows, strict=True):
            seq = self._sequences.get(row.uid)
            if seq is not None and row.flags & RowFlag.LATE and not outcome.tokens and row.epoch == seq.epoch:
                seq.max_len += 1
                seq.computed += 1

    def schedule(self, ctx: SchedulerContext) -> StepPlan | None:
        plan = super().schedule(ctx)
        self.by_step = {**getattr(self, "by_step", {}), ctx.step: plan}
        return plan

    def plan_of(self, result: StepResult) -> StepPlan:
        return self.by_step[result.step]


class Impatient(PolicyScheduler):
    """Ignores that rejected drafts shorten a sequence."""

    def update(self, result: StepResult) -> None:
        before = {uid: seq.max_len for uid, seq in self._sequences.items()}
        super().update(result)
        for uid, seq in self._sequences.items():
            if seq.slot >= 0 and seq.max_len < before.get(uid, 0):
                seq.computed += before[uid] - seq.max_len
                seq.max_len = before[uid]


class Disordered(PolicyScheduler):
    """Returns rows in non-canonical order."""

    def schedule(self, ctx: SchedulerContext) -> StepPlan | None:
        plan = super().schedule(ctx)
        if plan is not None:
            plan.rows.reverse()
        return plan


class Sticky(PolicyScheduler):
    """Feeds the same tokens again."""

    def _chunk(self, seq: Sequence, count: int, step) -> None:  # type: ignore[no-untyped-def]
        super()._chunk(seq, count, step)
        if seq.remaining > 1:
            seq.computed -= 1


class Doubled(PolicyScheduler):
    """Gives one slot to two rows."""

    def schedule(self, ctx: SchedulerContext) -> StepPlan | None:
        plan = super().schedule(ctx)
        if plan is not None and len(plan.rows) > 2:
            plan.rows[1] = Row(plan.rows[0].slot, *plan.rows[1][1:])
        return plan


class Abrupt(PolicyScheduler):
    """Feeds no token of a cached prefix again, though the drafter needs it."""

    def add(self, seq: Sequence) -> None:
        self.limits = replace(self.limits, again=0)
        super().add(seq)


class Jealous(PolicyScheduler):
    """Releases a refused sequence, which therefore never gets its turn."""

    def _acquire(self, seq: Sequence) -> bool:
        got = super()._acquire(seq)
        if not got:
            self._release(seq)
        return got


class LeastServed(PolicyScheduler):
    """Lets the sequence with the fewest output tokens run, which is a safe rank: it changes only with a token."""

    def served(self, seq: Sequence) -> int:
        return seq.known_len - seq.prompt_len

    def order(self, waiting: Iterable[Sequence], ctx: SchedulerContext) -> Iterable[Sequence]:
        return sorted(waiting, key=self.served)

    def gives_way(self, seq: Sequence, candidates: list[Sequence], ctx: SchedulerContext) -> Sequence | None:
        last = max(candidates, key=self.served)
        return last if self.served(last) > self.served(seq) else None


class Parricide(LeastServed):
    """Preempts a parent in favour of its sample, which then has to wait until the prompt is computed again."""

    def schedule(self, ctx: SchedulerContext) -> StepPlan | None:
        for seq in list(self.waiting.values()):
            parent = seq.parent
            if parent is not None and parent.uid in self.running and parent.computed >= parent.prompt_len:
                self._preempt(parent)
        return super().schedule(ctx)


class Seesaw(LeastServed):
    """Ranks by computed tokens, which a preemption undoes."""

    def served(self, seq: Sequence) -> int:
        return seq.computed


class Hoarding(PolicyScheduler):
    """Keeps every sequence."""

    def add(self, seq: Sequence) -> None:
        super().add(seq)
        self.seen = [*getattr(self, "seen", ()), seq]


class Scribbler(PolicyScheduler):
    """Writes to a request."""

    def entered(self, seq: Sequence, ctx: SchedulerContext) -> None:
        seq.request.hints["entered"] = ctx.step  # type: ignore[index]


BROKEN: dict[str, list[type[PolicyScheduler]]] = {
    "test_token_values_do_not_matter": [
        # Orders by what the model has said.
        fault("Reader", order=lambda self, waiting, ctx: sorted(waiting, key=lambda seq: seq.tokens[-1]))
    ],
    "test_ended_sequences_are_forgotten": [Hoarding],
    "test_preempted_requests_do_not_starve": [
        # Lets those wait that were preempted most often.
        fault("Spiteful", order=lambda self, waiting, ctx: sorted(waiting, key=lambda seq: seq.preemptions))
    ],
    "test_every_preemption_is_worth_it": [Parricide, Seesaw],
    "test_sequences_wait_for_their_adapters": [
        # Lets sequences join without acquiring their resources.
        fault("Reckless", _acquire=lambda self, seq: True),
        # Keeps adapter slots of sequences that have left.
        fault("Hoarder", _release=lambda self, seq: None),
    ],
    "test_an_adapter_in_use_does_not_keep_others_out": [Jealous],
    "test_equal_calls_give_equal_plans": [
        # Depends on more than its inputs.
        fault("Undecided", order=lambda self, waiting, ctx: sorted(waiting, key=lambda seq: CHAOS.random()))
    ],
    "test_limits_hold": [Greedy, Disordered, Doubled],
    "test_every_request_gets_its_own_output": [Scribbler, Forgetful, Amnesiac, Overtaken, Impatient, Abrupt],
    "test_a_window_group_that_holds_one_sequence": [
        # Reserves a window group's pages only for the first chunk.
        fault(
            "TakesRoomOnce",
            _feed=lambda self, seq, step, ctx: self._chunk(seq, self.chunk(seq, step.budget, ctx), step),
        )
    ],
    "test_rows_with_a_grammar": [Confident],
    # Never runs odd arrivals.
    "test_no_request_starves": [fault("Unfair", admit=lambda self, seq, ctx: seq.request.uid % 2 == 0)],
    # Accepts requests that can never fit.
    "test_what_can_never_run_is_rejected": [fault("Optimist", _never_fits=lambda self, seq: None)],
    "test_a_prompt_longer_than_the_budget_is_fed_in_chunks": [Sticky],
}


def suite_of(scheduler: type[PolicyScheduler]) -> SchedulerContract:
    return suite(
        SchedulerContract,
        make=lambda self, limits, kv: scheduler(None, limits, kv),
        oldest_first=scheduler is not LeastServed,
    )


@each(BROKEN)
def test_the_suite_rejects(broken: type[PolicyScheduler], test: str) -> None:
    assert rejects(suite_of(broken), test)


@pytest.mark.nightly
@pytest.mark.parametrize("sound", [PolicyScheduler, LeastServed])
def test_a_sound_one_passes(sound: type[PolicyScheduler]) -> None:
    """With least-served-first, an endless stream of new requests keeps older ones out."""
    assert failures(suite_of(sound)) == {}
