"""PolicyScheduler: the mechanics that every scheduler shares. Subclasses supply the policy. The mechanics are slots,
pages, chunked prefill (Sarathi, Agrawal et al. 2023), preemption by recompute, forks, and results that arrive depth - 1
steps after their plan. A policy overrides only order or rank, admit, reject, entered, chunk, victim, gives_way and
draft_tokens."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from operator import itemgetter
from typing import Any

from dovetail.core.engine.drafting import Drafting
from dovetail.core.engine.plan_builder import PlanBuilder, page_deltas
from dovetail.core.engine.waiting_queue import WaitingQueue, never_fits
from dovetail.core.interfaces import (
    FinishReason,
    Hit,
    Join,
    KVAllocator,
    PageOp,
    Reservation,
    Row,
    RowResult,
    Scheduler,
    SchedulerContext,
    SchedulerLimits,
    SchedulerStats,
    Sequence,
    Status,
    StepPlan,
    StepResult,
)
from dovetail.core.interfaces.plan import DECODE_AND_SAMPLE, SAMPLE

_new = tuple.__new__
_TOKENS = itemgetter(RowResult._fields.index("tokens"))


class PolicyScheduler(Scheduler):
    """First come, first served unless a policy method decides otherwise. Running sequences go before waiting ones."""

    def __init__(self, config: object, limits: SchedulerLimits, kv: KVAllocator) -> None:
        super().__init__(config, limits, kv)
        self._queue = WaitingQueue(self.rank)
        self.waiting = self._queue.new
        """Sequences that have never run, in order of arrival."""
        self.resuming = self._queue.preempted
        """Preempted sequences, in order of preemption. One may re-enter at inflight == 0."""
        self.running: dict[int, Sequence] = {}
        """Running sequences, in order of admission."""
        self._sequences: dict[int, Sequence] = {}
        self._launched: deque[StepPlan] = deque()
        self._free_slots = list(range(limits.max_seqs))
        self._leaves: list[int] = []
        self._ops: list[PageOp] = []
        """Page operations for the next plan, in the allocator's order. The allocator relies on all of them, even if the
        sequence that caused one has left."""
        self._rejected: list[tuple[int, str]] = []
        self._preemptions = 0
        self._departures = 0
        """Number of times that a sequence left the device and returned its pages."""
        self._failed_entry: tuple[int, int, int] | None = None
        """(uid, cached tokens, departures) of the last sequence that found no room. It is not tried again while these
        are unchanged: each attempt would visit all pages of the prompt and count as a use of its cached pages."""
        self._may_displace = type(self).gives_way is not PolicyScheduler.gives_way
        weighs = limits.lookahead > 0 and limits.weighs_drafts
        # In groups without a window a prefix has all of its pages. A drafter's groups come last.
        self._drafting = Drafting(limits, *[group for group in kv.groups if not group.window][-1:]) if weighs else None
        self._drafts: Mapping[int, int] | None = None
        """Drafts of decode rows in this step by uid, where they are expected to pay; None = all rows have drafts."""

    # Policy: override these.

    def order(self, waiting: Iterable[Sequence], ctx: SchedulerContext) -> Iterable[Sequence]:
        """Return the waiting sequences in the order in which they should enter. Default: as given, which is by `rank`
        if there is one, otherwise preempted ones first, then by arrival. Return a lazy iterable if the queue may be
        long: only as many are taken as may enter. Sequences with results in flight or an unfinished parent are
        skipped."""
        return waiting

    def rank(self, seq: Sequence) -> Any:
        """Return a fixed key: lower enters first, ties by arrival. Called once each time the sequence starts to wait.
        None = no ranks. A rank costs one heap operation per sequence, where `order` would sort the whole queue."""
        return None

    def admit(self, seq: Sequence, ctx: SchedulerContext) -> bool:
        """Whether this sequence may enter now. False ends admission for this step."""
        return True

    def reject(self, seq: Sequence, ctx: SchedulerContext) -> str | None:
        """Return a reason never to run this waiting sequence, or None."""
        return None

    def entered(self, seq: Sequence, ctx: SchedulerContext) -> None:
        """Called when the sequence has received a slot and its pages (again, if seq.preemptions > 0)."""

    def chunk(self, seq: Sequence, budget: int, ctx: SchedulerContext) -> int:
        """Return the number of tokens to prefill now, at most `budget`. 0 = not in this step."""
        return min(seq.remaining, budget)

    def victim(self, candidates: list[Sequence], ctx: SchedulerContext) -> Sequence:
        """Return the sequence to preempt when pages run out. Candidates are the running sequences that are not yet in
        this plan, in order of admission."""
        return candidates[-1]

    def gives_way(self, seq: Sequence, candidates: list[Sequence], ctx: SchedulerContext) -> Sequence | None:
        """Return a running sequence to preempt if the first waiting sequence `seq` cannot enter otherwise; None = `seq`
        waits. Candidates as for victim, without other samples of its request. Must be asymmetric: a displaced
        sequence may not displace `seq` in turn. Between two output tokens of a sequence its rank must not change."""
        return None

    def draft_tokens(self, seq: Sequence, ctx: SchedulerContext) -> int:
        """Return the number of drafts to verify in a decode row, at most limits.lookahead. Default: all, but with a
        cost model and limits.weighs_drafts those that are expected to pay."""
        return self.limits.lookahead if self._drafts is None else self._drafts.get(seq.uid, 0)

    # Contract.

    def add(self, seq: Sequence) -> None:
        if seq.uid in self._sequences:
            raise ValueError(f"sequence {seq.uid} was added twice")
        self._sequences[seq.uid] = seq
        reason = self._never_fits(seq)
        if reason:
            self._rejected.append((seq.uid, reason))
        else:
            self._queue.add(seq)

    def schedule(self, ctx: SchedulerContext) -> StepPlan | None:
        builder = PlanBuilder(ctx.step, self.limits.token_budget)
        if self._may_displace:
            self._displace(builder, ctx)
        self._schedule_running(builder, ctx)
        self._schedule_waiting(builder, ctx)
        # Leaves and page operations are kept until there is a plan.
        plan = builder.build(self._leaves, self._ops) if builder.decodes or builder.chunks else None
        if self._drafting is not None:
            self._drafting.launched(plan, self._sequences)
        if plan is None:
            return None
        self._leaves, self._ops = [], []
        for row in builder.chunks:
            seq = self._sequences[row.uid]
            self.kv.publish(seq, min(seq.computed, seq.known_len))
        self._launched.append(plan)
        return plan

    def update(self, result: StepResult) -> None:
        plan = self._launched.popleft()
        assert plan.step == result.step, f"got the result of step {result.step}; the oldest in flight is {plan.step}"
        if self._drafting is not None:
            self._drafting.update(plan, result)
        known, publish, gain = self._sequences.get, self.kv.publish, self.limits.gain
        tokens = map(_TOKENS, result.rows)
        for (_, uid, epoch, _, _, draft, flags), sampled in zip(plan.rows, tokens, strict=True):
            seq = known(uid)
            if seq is None:
                continue
            seq.inflight -= 1
            if not flags & SAMPLE:
                continue
            # Rejected drafts. A LATE row without its mask yields no token, and its last token is fed again.
            surplus = gain(draft) - len(sampled)
            current = epoch == seq.epoch
            if surplus:
                seq.max_len -= surplus
                seq.computed -= surplus if current else 0
            if current:
                publish(seq, len(seq.tokens) - 1)

    def finish(self, uid: int, keep_len: int, reason: FinishReason) -> None:
        seq = self._sequences.pop(uid, None)
        if seq is None:
            return
        self._queue.remove(uid)
        self._leave(seq)
        seq.status = Status.FINISHED
        del seq.tokens[keep_len:]

    def take_rejected(self) -> list[tuple[int, str]]:
        rejected, self._rejected = self._rejected, []
        return rejected

    def stats(self) -> SchedulerStats:
        return SchedulerStats(len(self._queue), len(self.running), self._preemptions)

    # Mechanics.

    def _never_fits(self, seq: Sequence) -> str | None:
        return never_fits(seq, self.limits, self.kv)

    def _schedule_running(self, builder: PlanBuilder, ctx: SchedulerContext) -> None:
        """Plan decode rows first: they are cheap, and clients stream their tokens."""
        running = list(self.running.values())
        # A sequence that has just joined already has pages. It gets its first chunk, even of one token, as prefill.
        joined = {join.uid for join in builder.joins}
        feeding = [seq for seq in running if seq.max_len - seq.computed != 1 or seq.uid in joined]
        if feeding:
            fed = {seq.uid for seq in feeding}
            running = [seq for seq in running if seq.uid not in fed]
        if self._drafting is not None and ctx.cost is not None and running:
            # Nothing enters if the queue's first sequence has no room.
            waiting = chain(self.resuming.values(), self.waiting.values())
            entering = islice(waiting, len(self._free_slots) if self._failed_entry is None else 0)
            self._drafts = self._drafting.choose(running, chain(feeding, entering), builder.budget, ctx.cost)
        self._decode(running, builder, ctx)
        for seq in feeding:
            if builder.budget and seq.status is Status.RUNNING:
                self._feed(seq, builder, ctx)

    def _decode(self, decoding: list[Sequence], builder: PlanBuilder, ctx: SchedulerContext) -> None:
        """Plan one decode row per sequence. This is the hottest loop on the host, hence the local names."""
        reserve, lookahead, running = self.kv.reserve, self.limits.lookahead, Status.RUNNING
        budget, append = builder.budget, builder.decodes.append
        depth = lookahead if self.limits.draft_depth is None else self.limits.draft_depth
        # The drafter of a tree writes pages for drafts that the step does not verify.
        tree = depth < lookahead
        for seq in decoding:
            room = seq.limit - seq.max_len
            # Without room, the plans in flight may already complete the sequence.
            if room <= 0 or not budget or seq.status is not running:
                continue
            draft = 0
            # Masks of a grammar are for chains.
            if lookahead and not (tree and seq.request.params.grammar is not None):
                draft = min(self.draft_tokens(seq, ctx), budget - 1)
                # A tree of so few drafts is not deeper than the room.
                draft = draft if depth < room else min(draft, room - 1)
            count = gain = 1 + draft
            bound = seq.computed + count
            upto = bound
            if tree and draft:
                gain, upto = 1 + min(draft, depth), seq.computed + 1 + lookahead
            reserved = reserve(seq, upto)
            if reserved is None and (reserved := self._reserve(seq, upto, builder, ctx)) is None:
                continue
            if reserved.entries or reserved.ops:
                self._add_pages(seq, reserved, builder)
            seq.computed += gain
            seq.max_len += gain
            seq.inflight += 1
            # tuple.__new__ skips the Python frame that NamedTuple's constructor costs for each row.
            append(_new(Row, (seq.slot, seq.uid, seq.epoch, count, bound, draft, DECODE_AND_SAMPLE)))
            budget -= count
        builder.budget = budget

    def _feed(self, seq: Sequence, builder: PlanBuilder, ctx: SchedulerContext) -> None:
        """Plan the next chunk. Only window groups may need pages: the others reserved all when the sequence entered."""
        count = min(self.chunk(seq, builder.budget, ctx), seq.remaining, builder.budget)
        if count > 0 and (reserved := self._reserve(seq, seq.computed + count, builder, ctx)) is not None:
            self._add_pages(seq, reserved, builder)
            self._chunk(seq, count, builder)

    def _chunk(self, seq: Sequence, count: int, builder: PlanBuilder) -> None:
        """Add a prefill row. Its pages are already reserved."""
        count = min(count, seq.remaining, builder.budget)
        if count <= 0:
            return
        seq.computed += count
        seq.inflight += 1
        last = seq.computed == seq.max_len
        seq.max_len += last
        builder.chunks.append(Row(seq.slot, seq.uid, seq.epoch, count, seq.computed, 0, SAMPLE if last else 0))
        builder.budget -= count

    def _reserve(self, seq: Sequence, bound: int, builder: PlanBuilder, ctx: SchedulerContext) -> Reservation | None:
        """Reserve pages, preempting sequences that are not yet in this plan. The victim may be `seq` itself."""
        while (reserved := self.kv.reserve(seq, bound)) is None:
            candidates = self._preemptible(builder)
            if not candidates:
                return None  # The sequence joined in this plan and gets its first chunk in the next one.
            chosen = self._checked(self.victim(candidates, ctx), candidates, "victim")
            self._preempt(chosen)
            if chosen is seq:
                return None
        return reserved

    def _add_pages(self, seq: Sequence, pages: Hit | Reservation, builder: PlanBuilder) -> None:
        """Add pages of a sequence that has a slot to the plan."""
        self._ops += pages.ops
        builder.pages += page_deltas(seq, pages)

    def _preemptible(self, builder: PlanBuilder) -> list[Sequence]:
        """Return the running sequences that have neither a row nor a join in this plan."""
        planned = {entry.uid for entries in (builder.decodes, builder.chunks, builder.joins) for entry in entries}
        return [seq for seq in self.running.values() if seq.uid not in planned]

    def _schedule_waiting(self, builder: PlanBuilder, ctx: SchedulerContext) -> None:
        if not builder.budget or not self._free_slots:
            return
        candidates = self._candidates(builder, ctx)
        if self.resources:
            first = {resource.first for resource in self.resources}
            candidates.sort(key=lambda seq: seq.uid not in first)
        for seq in candidates:
            if not builder.budget or not self._free_slots:
                return
            if self._try_reject(seq, ctx):
                continue
            if not self.admit(seq, ctx):
                return
            if not self._acquire(seq):
                continue  # The sequence enters when others leave. Sequences after it may not need the resource.
            entered = self._enter(seq, builder, ctx)
            if seq.status is not Status.RUNNING:
                self._release(seq)
            if not entered:
                return

    def _displace(self, builder: PlanBuilder, ctx: SchedulerContext) -> None:
        """While the first sequence of the queue outranks a running one, let it enter, and preempt that one if needed.
        Runs before running sequences are planned; if those leave no budget, it joins this plan without a row."""
        while (seq := next(iter(self._candidates(builder, ctx, 1)), None)) is not None:
            if self._try_reject(seq, ctx):
                continue
            count = self.chunk(seq, builder.budget, ctx)
            if count <= 0 or not self.admit(seq, ctx) or not self._acquire(seq):
                return
            while (chosen := self._displaced_by(seq, builder, ctx)) is not None:
                if not self._join_if_room(seq, count, builder, ctx):
                    self._preempt(chosen)
                    self._join_if_room(seq, count, builder, ctx)
                if seq.status is Status.RUNNING:
                    break
            else:
                self._release(seq)
                return

    def _displaced_by(self, seq: Sequence, builder: PlanBuilder, ctx: SchedulerContext) -> Sequence | None:
        """Return the running sequence that gives way to `seq`. Samples of one request never displace each other: a
        sample waits until the prompt of its parent is computed, so it could not enter in the parent's place."""
        candidates = [other for other in self._preemptible(builder) if other.request is not seq.request]
        chosen = self.gives_way(seq, candidates, ctx) if candidates else None
        return None if chosen is None else self._checked(chosen, candidates, "gives_way")

    def _checked(self, chosen: Sequence, candidates: list[Sequence], method: str) -> Sequence:
        if chosen not in candidates:
            offered = ", ".join(str(seq.uid) for seq in candidates)
            raise ValueError(f"{type(self).__name__}.{method} chose sequence {chosen.uid}, not a candidate ({offered})")
        return chosen

    def _try_reject(self, seq: Sequence, ctx: SchedulerContext) -> bool:
        """Reject the sequence if the policy does. Return whether it was rejected."""
        if (reason := self.reject(seq, ctx)) is None:
            return False
        self._rejected.append((seq.uid, reason))
        self._queue.remove(seq.uid)
        self._release(seq)
        return True

    def _acquire(self, seq: Sequence) -> bool:
        """Acquire all resources or none."""
        for i, resource in enumerate(self.resources):
            if not resource.try_acquire(seq):
                for held in self.resources[:i]:
                    held.release(seq)
                return False
        return True

    def _release(self, seq: Sequence) -> None:
        for resource in self.resources:
            resource.release(seq)

    def _candidates(self, builder: PlanBuilder, ctx: SchedulerContext, most: int | None = None) -> list[Sequence]:
        """Return the first `most` sequences of the queue that may enter this plan, by default about as many as there
        are free slots. With a lazy order the rest of the queue is not visited."""
        if most is None:
            most = len(self._free_slots) + 64
        queue = self._queue.by_rank()
        found = []
        for seq in self.order(queue, ctx):
            if seq.inflight == 0 and not self._awaits_parent(seq, builder):
                found.append(seq)
                if len(found) == most:
                    break
        queue.close()
        return found

    def _awaits_parent(self, seq: Sequence, builder: PlanBuilder) -> bool:
        """Whether the parent's prompt is not yet computed by an earlier plan. Forked pages are copied before a plan's
        forward, so the same plan cannot fill them."""
        parent = seq.parent
        if parent is None or parent.status is Status.FINISHED:
            return False
        return parent.computed < parent.prompt_len or any(row.uid == parent.uid for row in builder.chunks)

    def _join_if_room(self, seq: Sequence, count: int, builder: PlanBuilder, ctx: SchedulerContext) -> bool:
        return bool(self._free_slots) and self._join(seq, count, builder, ctx)

    def _enter(self, seq: Sequence, builder: PlanBuilder, ctx: SchedulerContext) -> bool:
        """Let the sequence join and plan its first chunk. False = no room."""
        count = self.chunk(seq, builder.budget, ctx)
        if count > 0:
            if not self._join(seq, count, builder, ctx):
                return False
            self._chunk(seq, count, builder)
        return True

    def _join(self, seq: Sequence, count: int, builder: PlanBuilder, ctx: SchedulerContext) -> bool:
        """Give the sequence a slot, its cached prefix and pages for every known token, in window groups only for the
        first `count`. False = no room."""
        attempt = seq.uid, self.kv.peek(seq), self._departures
        if attempt == self._failed_entry:
            return False
        parent = seq.parent
        if parent is not None and parent.status is Status.RUNNING and seq.known_len == seq.prompt_len:
            hit = self.kv.fork(parent, seq, seq.prompt_len - 1)
        else:
            hit = self.kv.acquire(seq, reuse=not seq.request.feeds_all)
        self._ops += hit.ops
        reserved = self.kv.reserve(seq, min(hit.tokens + count, seq.known_len), ahead=seq.known_len)
        if reserved is None:
            self.kv.release(seq)
            # Sliding windows return pages without a departure.
            self._failed_entry = None if any(group.window for group in self.kv.groups) else attempt
            return False
        if seq.preemptions == 0:
            seq.cached = hit.tokens
        self._queue.remove(seq.uid)
        self.running[seq.uid] = seq
        again = min(self.limits.again, hit.tokens)
        seq.status, seq.slot, seq.computed = Status.RUNNING, heapq.heappop(self._free_slots), hit.tokens - again
        builder.joins.append(Join(seq.slot, seq.uid, seq.epoch, hit.tokens, again))
        builder.pages += page_deltas(seq, hit)
        self._add_pages(seq, reserved, builder)
        self.entered(seq, ctx)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._leave(seq)
        seq.status, seq.computed = Status.WAITING, 0
        seq.epoch += 1
        seq.preemptions += 1
        self._preemptions += 1
        self._queue.add(seq, preempted=True)

    def _leave(self, seq: Sequence) -> None:
        """Free slot and pages for reuse at once: plans run in order, so the next owner writes after the last read."""
        if self.running.pop(seq.uid, None) is not None:
            heapq.heappush(self._free_slots, seq.slot)
            self._leaves.append(seq.slot)
            seq.slot = -1
            self._departures += 1
        self.kv.release(seq)
        self._release(seq)
