"""The scheduler seam: which sequences run in a step, how many tokens of each, and who has to give way.

Most authors subclass dovetail.PolicyScheduler and override policy alone; this is the full contract underneath.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.core.interfaces.cost import CostModel
    from dovetail.core.interfaces.kv_cache import KVAllocator
    from dovetail.core.interfaces.plan import StepPlan
    from dovetail.core.interfaces.records import FinishReason, Sequence, StepResult


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the engine grants: from the `engine` node and the model."""

    token_budget: int
    """Tokens a step may feed, drafts included."""
    max_seqs: int
    """Slots."""
    max_len: int
    """Tokens of one sequence, prompt and output."""
    lookahead: int = 0
    """Draft tokens the drafter can offer per step; 0 = no speculation."""
    depth: int = 1
    """Plans in flight at most."""
    weighs_drafts: bool = False
    """With a cost model, drafts are verified in steps alone in which they are expected to pay (engine.drafts)."""

    @property
    def ahead(self) -> int:
        """Tokens of one sequence that plans write at most before any of them is published: a chunk, or decode rows in
        flight."""
        return max(self.token_budget, self.depth * (1 + self.lookahead))


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """Inputs of one decision. A scheduler reads time, chance and cost from here alone, and how long steps took from
    their results, so that it can be replayed."""

    step: int
    clock: float
    """Seconds."""
    seed: int
    depth: int
    """Plans in flight at most, this one included."""
    kv_view: KVAllocator
    """For peek, pages_needed and stats; a scheduler also reserves through it (PolicyScheduler does)."""
    cost: CostModel | None = None


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    waiting: int
    running: int
    preemptions: int
    """Since start."""


class Resource(ABC):
    """What sequences may need on the device beside a slot and pages, of which there is little: adapter slots.

    It belongs to the engine. A scheduler asks before a sequence joins, and releases whenever one leaves.
    """

    @abstractmethod
    def try_acquire(self, seq: Sequence) -> bool:
        """Whether the sequence has what it needs of this from now on; it may need nothing. True again for a holder.

        False: it has to wait, and others may go first. Ask again in later steps, in the policy's order: whoever is
        refused is served once running holders have ended, however many others come.
        """

    @property
    def first(self) -> int | None:
        """Uid of who has waited long enough to be asked before all others that may enter; None = the policy's order."""
        return None

    @abstractmethod
    def release(self, seq: Sequence) -> None:
        """It has left the device, or does not wait any more. Any number of times, holder or not."""


class Scheduler(ABC):
    """Decides steps. Deterministic: equal calls give equal plans (a contract test runs it twice).

    Calls come from one thread. `schedule` never sees a token value; with depth > 1 it runs before the results of the
    depth - 1 plans before it have come. `finish` and `abort` may come between any two calls.
    """

    resources: tuple[Resource, ...] = ()
    """Every sequence must have acquired all of them before it joins. Written by the engine, before the first call."""

    def __init__(self, config: object, limits: SchedulerLimits, kv: KVAllocator) -> None:
        self.config, self.limits, self.kv = config, limits, kv

    @abstractmethod
    def add(self, seq: Sequence) -> None:
        """Take a new WAITING sequence."""

    @abstractmethod
    def schedule(self, ctx: SchedulerContext) -> StepPlan | None:
        """The next plan, or None when nothing can run before another result, arrival or finish.

        Mutates: sequence fields marked `scheduler`, the allocator. A returned plan will be launched. Rows of a request
        with a grammar have no drafts; the engine marks them LATE.
        """

    @abstractmethod
    def update(self, result: StepResult) -> None:
        """Take the oldest launched plan's result. Sequence.tokens already holds its tokens.

        Rows of finished sequences are ignored; rows of preempted ones (older epoch) only lower inflight. A LATE row may
        bring no token: its sequence is then as long as before, and its last token is to be fed again.
        """

    @abstractmethod
    def finish(self, uid: int, keep_len: int, reason: FinishReason) -> None:
        """The sequence is complete with keep_len tokens: give its slot and pages back. Valid at any time, once."""

    def abort(self, uid: int) -> None:
        """The client is gone. Unknown or finished uids are ignored, since an abort may cross a finish."""
        from dovetail.core.interfaces.records import FinishReason

        self.finish(uid, 0, FinishReason.ABORT)

    def take_rejected(self) -> list[tuple[int, str]]:
        """Sequences (uid, reason) the policy refused since the last call; the engine fails their requests."""
        return []

    @abstractmethod
    def stats(self) -> SchedulerStats:
        """How many wait and run now; asked after each step."""
