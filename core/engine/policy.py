"""PolicyScheduler: the mechanics every scheduler shares, with the policy left open.

Here: slots, pages, chunked prefill (Sarathi, Agrawal et al. 2023), preemption by recompute, forks, and results that
come depth - 1 steps late. A policy overrides order or rank, admit, reject, entered, chunk, victim, gives_way or
draft_tokens, and nothing else.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator, Iterable
from operator import attrgetter, itemgetter
from typing import Any

from dovetail.core.engine.drafting import Drafting
from dovetail.core.interfaces import (
    FinishReason,
    Hit,
    Join,
    KVAllocator,
    PageDelta,
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
_COMPUTED = attrgetter("computed")
_SLOT, _TOKENS = itemgetter(Row._fields.index("slot")), itemgetter(RowResult._fields.index("tokens"))


class PolicyScheduler(Scheduler):
    """First come, first served unless a policy method says otherwise. Running sequences come before waiting ones."""

    def __init__(self, config: object, limits: SchedulerLimits, kv: KVAllocator) -> None:
        super().__init__(config, limits, kv)
        self.waiting: dict[int, Sequence] = {}
        """Never on the device yet, in order of arrival."""
        self.resuming: dict[int, Sequence] = {}
        """Preempted, in order of preemption; they may re-enter at inflight == 0."""
        self.running: dict[int, Sequence] = {}
        """In order of admission."""
        self._sequences: dict[int, Sequence] = {}
        self._launched: deque[StepPlan] = deque()
        self._free_slots = list(range(limits.max_seqs))
        self._leaves: list[int] = []
        self._ops: list[PageOp] = []
        """For the next plan, in the order in which the allocator gave them: it counts on them whoever they were for."""
        self._rejected: list[tuple[int, str]] = []
        self._preemptions = 0
        self._ranked: list[tuple[Any, int, int, Sequence]] = []
        """Heap of (rank, uid, epoch, sequence) where the policy has ranks; entries of who left are dropped when met."""
        self._departures = 0
        """How often somebody gave pages back."""
        self._no_room: tuple[int, int, int] | None = None
        """Whoever found no room last: uid, cached tokens, departures. While these stay, trying again costs a prompt's
        pages a step, and to the cache each try would look like a use."""
        self._displaces = type(self).gives_way is not PolicyScheduler.gives_way
        self._drafting = Drafting(limits.lookahead) if limits.lookahead and limits.weighs_drafts else None
        self._drafts = limits.lookahead
        """Of a decode row in this step."""

    # Policy: override these.

    def order(self, waiting: Iterable[Sequence], ctx: SchedulerContext) -> Iterable[Sequence]:
        """Waiting sequences in the order they should enter. Default: as given (by `rank` where there is one, else
        preempted ones first, then by arrival). Be lazy where the queue may be long: only as many are taken as may
        enter, and those whose results or parent are still on the way are passed over."""
        return waiting

    def rank(self, seq: Sequence) -> Any:
        """A fixed key, lower enters first, ties by arrival; asked once each time the sequence starts to wait. None = no
        ranks. With ranks a queue of any length costs a heap operation a sequence, where `order` would have to sort."""
        return None

    def admit(self, seq: Sequence, ctx: SchedulerContext) -> bool:
        """Whether this sequence may enter now. False ends admission for this step."""
        return True

    def reject(self, seq: Sequence, ctx: SchedulerContext) -> str | None:
        """A reason never to run this waiting sequence, or None."""
        return None

    def entered(self, seq: Sequence, ctx: SchedulerContext) -> None:
        """The sequence has just got a slot and its pages (again, where seq.preemptions > 0)."""

    def chunk(self, seq: Sequence, budget: int, ctx: SchedulerContext) -> int:
        """Tokens to prefill now, at most `budget`. 0 = not in this step."""
        return min(seq.remaining, budget)

    def victim(self, candidates: list[Sequence], ctx: SchedulerContext) -> Sequence:
        """Whom to preempt when pages run out. Candidates are running, not in this plan yet, in order of admission."""
        return candidates[-1]

    def gives_way(self, seq: Sequence, candidates: list[Sequence], ctx: SchedulerContext) -> Sequence | None:
        """Who of the running is outranked by the first waiting sequence and preempted if that cannot enter otherwise;
        None = it waits. Candidates as for victim. Must not be mutual: nobody may displace who displaced him."""
        return None

    def draft_tokens(self, seq: Sequence, ctx: SchedulerContext) -> int:
        """Drafts to verify for a decode row, at most limits.lookahead. Default: with a cost model and
        limits.weighs_drafts all, in steps in which they are expected to pay, and none in the others; else all."""
        return self._drafts

    # Contract.

    def add(self, seq: Sequence) -> None:
        if seq.uid in self._sequences:
            raise ValueError(f"sequence {seq.uid} was added twice")
        self._sequences[seq.uid] = seq
        reason = self._never_fits(seq)
        if reason:
            self._rejected.append((seq.uid, reason))
        else:
            self._wait(seq, self.waiting)

    def schedule(self, ctx: SchedulerContext) -> StepPlan | None:
        step = _Step(ctx.step, self.limits.token_budget)
        if self._displaces:
            self._make_way(step, ctx)
        self._schedule_running(step, ctx)
        self._schedule_waiting(step, ctx)
        # Leaves and page operations stay until a plan carries them.
        plan = step.plan(self._leaves, self._ops) if step.decodes or step.chunks else None
        if self._drafting is not None:
            self._drafting.launched(plan)
        if plan is None:
            return None
        self._leaves, self._ops = [], []
        for row in step.chunks:
            seq = self._sequences[row.uid]
            self.kv.publish(seq, min(seq.computed, seq.known_len))
        self._launched.append(plan)
        return plan

    def update(self, result: StepResult) -> None:
        plan = self._launched.popleft()
        assert plan.step == result.step, f"result of step {result.step} came, step {plan.step} is the oldest in flight"
        if self._drafting is not None:
            self._drafting.update(plan, result)
        known, publish = self._sequences.get, self.kv.publish
        tokens = map(_TOKENS, result.rows)
        for (_, uid, epoch, _, _, draft, flags), came in zip(plan.rows, tokens, strict=True):
            seq = known(uid)
            if seq is None:
                continue
            seq.inflight -= 1
            if not flags & SAMPLE:
                continue
            # More than the drafts where a row without its mask sat the step out: its last token is fed again.
            surplus = draft + 1 - len(came)
            here = epoch == seq.epoch
            if surplus:
                seq.max_len -= surplus
                seq.computed -= surplus if here else 0
            if here:
                publish(seq, len(seq.tokens) - 1)

    def finish(self, uid: int, keep_len: int, reason: FinishReason) -> None:
        seq = self._sequences.pop(uid, None)
        if seq is None:
            return
        self.waiting.pop(uid, None)
        self.resuming.pop(uid, None)
        self._leave(seq)
        seq.status = Status.FINISHED
        del seq.tokens[keep_len:]

    def take_rejected(self) -> list[tuple[int, str]]:
        rejected, self._rejected = self._rejected, []
        return rejected

    def stats(self) -> SchedulerStats:
        return SchedulerStats(len(self.waiting) + len(self.resuming), len(self.running), self._preemptions)

    # Mechanics.

    def _never_fits(self, seq: Sequence) -> str | None:
        if seq.known_len >= self.limits.max_len:
            limit = self.limits.max_len
            return f"prompt of {seq.known_len} tokens leaves no room in a context of {limit} (engine.max_len)"
        for group, pages in self.kv.pages_needed(seq.limit, self.limits.ahead).items():
            have = self.kv.num_pages[group]
            if pages > have:
                return (
                    f"{seq.limit} tokens need {pages} KV pages and the cache has {have}: lower max_tokens, shorten the "
                    "prompt, or raise engine.kv_pages or engine.memory_fraction"
                )
        return None

    def _schedule_running(self, step: _Step, ctx: SchedulerContext) -> None:
        """Decode rows first: they are cheap and somebody reads along."""
        running = list(self.running.values())
        # Whoever has just joined has its pages already and gets its first chunk, be it a single token.
        joined = {join.uid for join in step.joins}
        feeding = [seq for seq in running if seq.max_len - seq.computed != 1 or seq.uid in joined]
        if feeding:
            fed = {seq.uid for seq in feeding}
            running = [seq for seq in running if seq.uid not in fed]
        self._decode(running, step, ctx)
        for seq in feeding:
            if step.budget and seq.status is Status.RUNNING:
                self._feed(seq, step, ctx)

    def _decode(self, decoding: list[Sequence], step: _Step, ctx: SchedulerContext) -> None:
        """A row each. The hottest loop of the host, hence its local names."""
        reserve, lookahead, running = self.kv.reserve, self.limits.lookahead, Status.RUNNING
        budget, append = step.budget, step.decodes.append
        if self._drafting is not None and ctx.cost is not None and decoding:
            length = sum(map(_COMPUTED, decoding)) // len(decoding)
            self._drafts = self._drafting.choose(len(decoding), length, ctx.cost)
        for seq in decoding:
            room = seq.limit - seq.max_len
            # Without room the plans in flight may complete it.
            if room <= 0 or not budget or seq.status is not running:
                continue
            draft = 0
            if lookahead and seq.request.params.grammar is None:
                draft = min(self.draft_tokens(seq, ctx), room - 1, budget - 1)
            count = 1 + draft
            upto = seq.computed + count
            made = reserve(seq, upto)
            if made is None and (made := self._reserve(seq, upto, step, ctx)) is None:
                continue
            if made.entries or made.ops:
                self._take(seq, made, step)
            seq.computed = upto
            seq.max_len += count
            seq.inflight += 1
            # tuple.__new__ skips the Python frame that NamedTuple's constructor costs for each row.
            append(_new(Row, (seq.slot, seq.uid, seq.epoch, count, upto, draft, DECODE_AND_SAMPLE)))
            budget -= count
        step.budget = budget

    def _feed(self, seq: Sequence, step: _Step, ctx: SchedulerContext) -> None:
        """The next chunk. Only window groups may need pages: the others took theirs when the sequence entered."""
        count = min(self.chunk(seq, step.budget, ctx), seq.remaining, step.budget)
        if count > 0 and (made := self._reserve(seq, seq.computed + count, step, ctx)) is not None:
            self._take(seq, made, step)
            self._chunk(seq, count, step)

    def _chunk(self, seq: Sequence, count: int, step: _Step) -> None:
        """Its pages are reserved."""
        count = min(count, seq.remaining, step.budget)
        if count <= 0:
            return
        seq.computed += count
        seq.inflight += 1
        last = seq.computed == seq.max_len
        seq.max_len += last
        step.chunks.append(Row(seq.slot, seq.uid, seq.epoch, count, seq.computed, 0, SAMPLE if last else 0))
        step.budget -= count

    def _reserve(self, seq: Sequence, upto: int, step: _Step, ctx: SchedulerContext) -> Reservation | None:
        """Make room, preempting others not yet in this plan; the sequence itself goes when it is the victim."""
        while (made := self.kv.reserve(seq, upto)) is None:
            candidates = self._preemptible(step)
            if not candidates:
                return None  # It has joined in this plan, and gets its first chunk in the next one.
            chosen = self.victim(candidates, ctx)
            self._preempt(chosen)
            if chosen is seq:
                return None
        return made

    def _take(self, seq: Sequence, given: Hit | Reservation, step: _Step) -> None:
        """Pages of a sequence that has a slot become part of the plan."""
        self._ops += given.ops
        step.pages += _deltas(seq, given)

    def _preemptible(self, step: _Step) -> list[Sequence]:
        """Who has no row yet and has not just joined."""
        planned = {entry.uid for entries in (step.decodes, step.chunks, step.joins) for entry in entries}
        return [seq for seq in self.running.values() if seq.uid not in planned]

    def _schedule_waiting(self, step: _Step, ctx: SchedulerContext) -> None:
        if not step.budget or not self._free_slots:
            return
        candidates = self._candidates(step, ctx)
        if self.resources:
            first = {resource.first for resource in self.resources}
            candidates.sort(key=lambda seq: seq.uid not in first)
        for seq in candidates:
            if not step.budget or not self._free_slots:
                return
            if self._turned_away(seq, ctx):
                continue
            if not self.admit(seq, ctx):
                return
            if not self._acquire(seq):
                continue  # Its turn comes when others leave; who is behind it may need nothing of that.
            entered = self._enter(seq, step, ctx)
            if seq.status is not Status.RUNNING:
                self._release(seq)
            if not entered:
                return

    def _make_way(self, step: _Step, ctx: SchedulerContext) -> None:
        """Before the running ones are fed: while the first in the queue outranks one of them, it enters, if need be in
        place of that one. Where the others leave no budget it joins this plan without a row."""
        while (seq := next(iter(self._candidates(step, ctx, 1)), None)) is not None:
            if self._turned_away(seq, ctx):
                continue
            count = self.chunk(seq, step.budget, ctx)
            if count <= 0 or not self.admit(seq, ctx) or not self._acquire(seq):
                return
            while seq.status is not Status.RUNNING:
                candidates = self._preemptible(step)
                chosen = self.gives_way(seq, candidates, ctx) if candidates else None
                if chosen is None:
                    self._release(seq)
                    return
                if not self._free_slots or not self._join(seq, count, step, ctx):
                    self._preempt(chosen)

    def _turned_away(self, seq: Sequence, ctx: SchedulerContext) -> bool:
        if (reason := self.reject(seq, ctx)) is None:
            return False
        self._rejected.append((seq.uid, reason))
        self.waiting.pop(seq.uid, None)
        self.resuming.pop(seq.uid, None)
        self._release(seq)
        return True

    def _acquire(self, seq: Sequence) -> bool:
        """All resources or none."""
        for i, resource in enumerate(self.resources):
            if not resource.try_acquire(seq):
                for held in self.resources[:i]:
                    held.release(seq)
                return False
        return True

    def _release(self, seq: Sequence) -> None:
        for resource in self.resources:
            resource.release(seq)

    def _candidates(self, step: _Step, ctx: SchedulerContext, most: int | None = None) -> list[Sequence]:
        """The first of the queue that may enter a plan now; with a long queue and a lazy order, others are not looked
        at. By default as many as have a chance: admission ends at the first that finds no room."""
        if most is None:
            most = len(self._free_slots) + 64
        queue = self._queue()
        found = []
        for seq in self.order(queue, ctx):
            if seq.inflight == 0 and not self._awaits_parent(seq, step):
                found.append(seq)
                if len(found) == most:
                    break
        queue.close()
        return found

    def _queue(self) -> Generator[Sequence, None, None]:
        """Everybody who waits, by rank or else by arrival. Close it: whom it gave by rank goes back to the heap."""
        if not self._ranked:
            yield from self.resuming.values()
            yield from self.waiting.values()
            return
        taken = []
        try:
            while self._ranked:
                entry = heapq.heappop(self._ranked)
                if self._still_waits(entry):
                    taken.append(entry)
                    yield entry[-1]
        finally:
            for entry in taken:
                heapq.heappush(self._ranked, entry)

    def _still_waits(self, entry: tuple[Any, int, int, Sequence]) -> bool:
        _, uid, epoch, seq = entry
        return seq.epoch == epoch and (uid in self.waiting or uid in self.resuming)

    def _wait(self, seq: Sequence, queue: dict[int, Sequence]) -> None:
        queue[seq.uid] = seq
        if (rank := self.rank(seq)) is None:
            return
        heapq.heappush(self._ranked, (rank, seq.uid, seq.epoch, seq))
        if len(self._ranked) > 2 * (len(self.waiting) + len(self.resuming)) + 64:
            self._ranked = [entry for entry in self._ranked if self._still_waits(entry)]
            heapq.heapify(self._ranked)

    def _awaits_parent(self, seq: Sequence, step: _Step) -> bool:
        """Forked pages are copied before a plan's forward, so the plan that fills them must be an earlier one."""
        parent = seq.parent
        if parent is None or parent.status is Status.FINISHED:
            return False
        return parent.computed < parent.prompt_len or any(row.uid == parent.uid for row in step.chunks)

    def _enter(self, seq: Sequence, step: _Step, ctx: SchedulerContext) -> bool:
        """Join, and the first chunk. False = no room."""
        count = self.chunk(seq, step.budget, ctx)
        if count > 0:
            if not self._join(seq, count, step, ctx):
                return False
            self._chunk(seq, count, step)
        return True

    def _join(self, seq: Sequence, count: int, step: _Step, ctx: SchedulerContext) -> bool:
        """Give the sequence a slot, its cached prefix and room for every known token; in window groups for its first
        `count` alone."""
        attempt = seq.uid, self.kv.peek(seq), self._departures
        if attempt == self._no_room:
            return False
        parent = seq.parent
        if parent is not None and parent.status is Status.RUNNING and seq.known_len == seq.prompt_len:
            hit = self.kv.fork(parent, seq, seq.prompt_len - 1)
        else:
            hit = self.kv.acquire(seq, reuse=not seq.request.feeds_all)
        self._ops += hit.ops
        made = self.kv.reserve(seq, min(hit.tokens + count, seq.known_len), ahead=seq.known_len)
        if made is None:
            self.kv.release(seq)
            # Windows that slide give pages back though nobody leaves.
            self._no_room = None if any(group.window for group in self.kv.groups) else attempt
            return False
        if seq.preemptions == 0:
            seq.cached = hit.tokens
        self.waiting.pop(seq.uid, None)
        self.resuming.pop(seq.uid, None)
        self.running[seq.uid] = seq
        seq.status, seq.slot, seq.computed = Status.RUNNING, heapq.heappop(self._free_slots), hit.tokens
        step.joins.append(Join(seq.slot, seq.uid, seq.epoch, hit.tokens))
        step.pages += _deltas(seq, hit)
        self._take(seq, made, step)
        self.entered(seq, ctx)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._leave(seq)
        seq.status, seq.computed = Status.WAITING, 0
        seq.epoch += 1
        seq.preemptions += 1
        self._preemptions += 1
        self._wait(seq, self.resuming)

    def _leave(self, seq: Sequence) -> None:
        """Slot and pages may be given away at once: plans run in order, so whoever gets them writes after the last
        read."""
        if self.running.pop(seq.uid, None) is not None:
            heapq.heappush(self._free_slots, seq.slot)
            self._leaves.append(seq.slot)
            seq.slot = -1
            self._departures += 1
        self.kv.release(seq)
        self._release(seq)


class _Step:
    """A plan in the making."""

    def __init__(self, step: int, budget: int) -> None:
        self.step, self.budget = step, budget
        self.decodes: list[Row] = []
        self.chunks: list[Row] = []
        self.joins: list[Join] = []
        self.pages: list[PageDelta] = []

    def plan(self, leaves: list[int], ops: list[PageOp]) -> StepPlan:
        self.decodes.sort(key=_SLOT)
        self.chunks.sort(key=_SLOT)
        return StepPlan(self.step, self.decodes + self.chunks, self.joins, leaves, self.pages, ops)


def _deltas(seq: Sequence, given: Hit | Reservation) -> list[PageDelta]:
    slot = seq.slot
    return [_new(PageDelta, (group, slot, index, page)) for group, index, page in given.entries]
