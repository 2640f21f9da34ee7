"""Scheduler contract: which sequences run in a step, how many tokens each feeds, and which are preempted.

Most authors subclass dovetail.PolicyScheduler and override only the policy; this is the full contract underneath.
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
    """Limits from the `engine` node and the model."""

    token_budget: int
    """Maximum number of tokens per step, drafts included."""
    max_seqs: int
    """Number of slots."""
    max_len: int
    """Maximum length of one sequence, prompt and output together."""
    lookahead: int = 0
    """Maximum number of draft tokens per row and step; 0 = no speculation."""
    depth: int = 1
    """Maximum number of plans in flight."""
    draft_depth: int | None = None
    """Drafter.depth; None = lookahead. If it is less, drafts are trees, and a row with some of them needs room in its
    pages for all: the drafter writes those that the step does not verify, too."""
    weighs_drafts: bool = False
    """Whether only those drafts are verified that are expected to pay, according to the cost model (engine.drafts)."""
    draft_window: int | None = None
    draft_resumes: bool = True
    """Drafter.window and Drafter.resumes."""
    draft_counts: tuple[int, ...] = ()
    """Drafter.draft_counts; () = lookahead alone."""
    draft_catches_up: bool = False
    """Whether it also feeds chunks of earlier tokens (Drafter.catch_up, StepPlan.catch_up)."""
    again: int = 0
    """Tokens of a cached prefix, 0 or 1, that a sequence feeds again when it joins (Join.again), because the drafter
    needs the hidden state before each token that it computes (Drafter.follows_features)."""

    def gain(self, drafts: int) -> int:
        """Return the most tokens that a decode row with so many drafts yields: drafts of a tree exclude each other.
        This bounds its sequence's length, and `1 + drafts` its tokens in the step."""
        return 1 + (drafts if self.draft_depth is None else min(drafts, self.draft_depth))

    @property
    def ahead(self) -> int:
        """Maximum number of tokens of one sequence that plans write before any of them is published: a chunk, or the
        decode rows in flight."""
        return max(self.token_budget, self.depth * (1 + self.lookahead))


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """Inputs of one decision. A scheduler takes time, randomness and cost only from here, and past step times only from
    results, so that its decisions can be replayed."""

    step: int
    clock: float
    """Engine clock in seconds."""
    seed: int
    depth: int
    """Maximum number of plans in flight, this one included."""
    kv_view: KVAllocator
    """For peek, pages_needed and stats. A scheduler also reserves through it, as PolicyScheduler does."""
    cost: CostModel | None = None


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    waiting: int
    running: int
    preemptions: int
    """Number of preemptions since start."""


class Resource(ABC):
    """A scarce device resource that sequences may need in addition to a slot and pages: adapter slots. Owned by the
    engine. A scheduler acquires it before a sequence joins and releases it whenever one leaves."""

    @abstractmethod
    def try_acquire(self, seq: Sequence) -> bool:
        """Whether the sequence holds what it needs of this resource from now on (possibly nothing). True for a holder.

        False: the sequence has to wait, and others may go first. Ask again in later steps, in the policy's order. A
        refused sequence is served once the current holders have ended, regardless of later arrivals.
        """

    @property
    def first(self) -> int | None:
        """Uid of the sequence to admit first because it has waited too long; None = policy order."""
        return None

    @abstractmethod
    def release(self, seq: Sequence) -> None:
        """Give up the resource: the sequence has left the device or no longer waits. May be called repeatedly and for a
        sequence that holds nothing."""


class Scheduler(ABC):
    """Decides what each step runs. Deterministic: equal calls give equal plans (a contract test runs it twice).

    Calls come from one thread. `schedule` never sees token values; with depth > 1 it runs before the results of the
    preceding depth - 1 plans have arrived. `finish` and `abort` may come between any two calls.
    """

    resources: tuple[Resource, ...] = ()
    """Resources that every sequence must acquire before it joins. Written by the engine before the first call."""

    def __init__(self, config: object, limits: SchedulerLimits, kv: KVAllocator) -> None:
        self.config, self.limits, self.kv = config, limits, kv

    @abstractmethod
    def add(self, seq: Sequence) -> None:
        """Take a new WAITING sequence."""

    @abstractmethod
    def schedule(self, ctx: SchedulerContext) -> StepPlan | None:
        """Return the next plan, or None if nothing can run before another result, arrival or finish.

        Mutates the sequence fields marked as written by the scheduler, and the allocator. A returned plan will be
        launched. The engine marks rows of a request with a grammar LATE.
        """

    @abstractmethod
    def update(self, result: StepResult) -> None:
        """Take the result of the oldest launched plan. Sequence.tokens already includes its tokens.

        Rows of finished sequences are ignored; rows of preempted ones (older epoch) only lower inflight. A LATE row may
        yield no token: its sequence keeps its length, and its last token must be fed again.
        """

    @abstractmethod
    def finish(self, uid: int, keep_len: int, reason: FinishReason) -> None:
        """Complete the sequence with keep_len tokens: free its slot and pages. Valid at any time, once per sequence."""

    def abort(self, uid: int) -> None:
        """Finish a cancelled sequence. Unknown and finished uids are ignored, since an abort may cross a finish."""
        from dovetail.core.interfaces.records import FinishReason

        self.finish(uid, 0, FinishReason.ABORT)

    def take_rejected(self) -> list[tuple[int, str]]:
        """Return (uid, reason) of each sequence rejected since the last call. The engine fails their requests."""
        return []

    @abstractmethod
    def stats(self) -> SchedulerStats:
        """Return current counts. Called after each step."""
