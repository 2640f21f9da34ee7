"""A device made of Python lists: runs plans exactly as a rank would, without a model, and checks what a GPU could not.

Its "model" is a hash of everything before a token, so the right output of every request is known in advance; its
memory holds token ids where a GPU holds keys and values, so a page that was shared, freed or copied wrongly is found
at the step that reads it.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from dovetail.core.compose import EngineConfig
from dovetail.core.interfaces import (
    Blobs,
    Drafter,
    Executor,
    ExecutorInfo,
    KVAllocator,
    KVGroup,
    ModelSpec,
    PageOpKind,
    Progress,
    RowFlag,
    RowResult,
    Scheduler,
    SchedulerLimits,
    StepPlan,
    StepResult,
)

VOCAB = 50
EOS = 0
"""One token in VOCAB ends an output, so lengths vary."""


def next_token(tokens: Seq[int]) -> int:
    """The toy model, greedy."""
    return zlib.crc32(bytes(t % 251 for t in tokens)) % VOCAB


def expected_output(prompt: Seq[int], max_tokens: int, max_len: int, ignore_eos: bool = False) -> list[int]:
    """What the engine must produce, whatever scheduler, allocator, depth or drafter."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, max_len):
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


@dataclass(slots=True)
class _Slot:
    uid: int
    epoch: int
    tokens: list[int]
    computed: int
    drafts: list[int] = field(default_factory=list)
    tables: dict[int, dict[int, int]] = field(default_factory=dict)


class ToyDevice(Executor):
    """delay: plans held back before they run, as a slow device would; collect runs what it must."""

    def __init__(
        self,
        groups: Seq[KVGroup],
        num_pages: dict[int, int],
        *,
        max_seqs: int,
        max_len: int,
        lookahead: int = 0,
        delay: int = 0,
    ) -> None:
        self.groups, self.num_pages = tuple(groups), num_pages
        self.max_seqs, self.max_len, self.lookahead, self.delay = max_seqs, max_len, lookahead, delay
        self.memory: dict[tuple[int, int], dict[int, int]] = {}
        """(group, page) -> offset -> the token whose KV stands there."""
        self.slots: dict[int, _Slot] = {}
        self.plans: list[StepPlan] = []
        """Every plan submitted, for assertions."""
        self._queue: deque[tuple[StepPlan, Blobs]] = deque()
        self._results: deque[StepResult] = deque()

    def start(self, progress: Progress) -> ExecutorInfo:
        return ExecutorInfo(SPEC, self.groups, self.num_pages, self.max_len, self.lookahead, "toy", {})

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        self.plans.append(plan)
        self._queue.append((plan, dict(blobs)))
        while len(self._queue) > self.delay:
            self._run(*self._queue.popleft())

    def collect(self) -> StepResult:
        while not self._results:
            self._run(*self._queue.popleft())
        return self._results.popleft()

    @property
    def pending(self) -> int:
        return len(self._queue) + len(self._results)

    def shutdown(self) -> None:
        self._queue.clear()

    # The device.

    def _run(self, plan: StepPlan, blobs: Blobs) -> None:
        for slot in plan.leaves:
            assert slot in self.slots, f"step {plan.step}: slot {slot} leaves and nobody is there"
            del self.slots[slot]
        for join in plan.joins:
            assert join.slot not in self.slots, (
                f"step {plan.step}: slot {join.slot} is taken by {self.slots[join.slot].uid}"
            )
            assert 0 <= join.slot < self.max_seqs, f"slot {join.slot} of {self.max_seqs}"
            tokens = list(blobs[join.uid, join.epoch].tokens)
            assert join.computed < len(tokens), (
                f"sequence {join.uid}: {join.computed} of {len(tokens)} tokens given, none to feed"
            )
            self.slots[join.slot] = _Slot(
                join.uid, join.epoch, tokens, join.computed, [], {g.id: {} for g in self.groups}
            )
        for delta in plan.pages:
            assert 1 <= delta.page <= self.num_pages[delta.group], f"page {delta.page} of group {delta.group}"
            self.slots[delta.slot].tables[delta.group][delta.index] = delta.page
        for op in plan.ops:
            assert op.kind == PageOpKind.COPY, f"the toy device has no host memory: {op}"
            self.memory[op.group, op.dst] = dict(self.memory.get((op.group, op.src), {}))
        # As layers do: every row writes before any row reads.
        fed = {row.slot: self._write(plan, row) for row in plan.rows}
        results = tuple(self._read(i, row, *fed[row.slot]) for i, row in enumerate(plan.rows))
        self._results.append(StepResult(plan.step, results))

    def _write(self, plan: StepPlan, row: Any) -> tuple[int, list[int]]:
        slot = self.slots[row.slot]
        where = f"step {plan.step}, sequence {row.uid}"
        assert (slot.uid, slot.epoch) == (row.uid, row.epoch), f"{where}: slot {row.slot} holds {slot.uid}/{slot.epoch}"
        known = slot.tokens + (slot.drafts if row.flags & RowFlag.DECODE else [])
        if row.flags & RowFlag.DECODE:
            assert slot.computed == len(slot.tokens) - 1, (
                f"{where}: decode with {slot.computed} of {len(slot.tokens)} computed"
            )
            assert row.count == row.draft + 1, f"{where}: {row}"
        else:
            assert slot.computed + row.count <= len(slot.tokens), f"{where}: chunk runs past {len(slot.tokens)} tokens"
            assert row.bound == slot.computed + row.count, (
                f"{where}: bound {row.bound} is not {slot.computed} + {row.count}"
            )
        assert slot.computed + row.count <= row.bound <= self.max_len, (
            f"{where}: bound {row.bound}, computed {slot.computed}"
        )
        # Padded draft positions write too: garbage, but into pages that must be the sequence's own.
        feed = [known[i] if i < len(known) else -1 for i in range(slot.computed, slot.computed + row.count)]
        for group in self.groups:
            for i, token in enumerate(feed, start=slot.computed):
                index, offset = divmod(i, group.page_tokens)
                assert index in slot.tables[group.id], f"{where}: token {i} has no page in group {group.id}"
                self.memory.setdefault((group.id, slot.tables[group.id][index]), {})[offset] = token
        return slot.computed, feed

    def _read(self, index: int, row: Any, start: int, feed: list[int]) -> RowResult:
        slot = self.slots[row.slot]
        known = slot.tokens + slot.drafts[: row.draft]
        for group in self.groups:
            for i in range(min(start + row.count, len(known))):
                page, offset = divmod(i, group.page_tokens)
                held = self.memory[group.id, slot.tables[group.id][page]].get(offset)
                assert held == known[i], (
                    f"sequence {row.uid} reads {held} at position {i} of group {group.id}, wrote {known[i]}"
                )
        if not row.flags & RowFlag.SAMPLE:
            slot.computed += row.count
            return RowResult(index, row.uid, row.epoch)
        assert row.flags & RowFlag.DECODE or start + row.count == len(slot.tokens), (
            f"{row} samples in the middle of known tokens"
        )
        tokens = list(slot.tokens)
        out: list[int] = []
        for draft in [*slot.drafts[: row.draft], None]:
            token = next_token(tokens)
            out.append(token)
            tokens.append(token)
            if draft != token:
                break
        slot.tokens, slot.computed = tokens, len(tokens) - 1
        slot.drafts = self._draft(tokens)
        return RowResult(index, row.uid, row.epoch, tuple(out))

    def _draft(self, tokens: list[int]) -> list[int]:
        """Right or wrong by a hash, and not always as many as there could be."""
        luck = zlib.crc32(bytes(t % 251 for t in tokens), 7)
        guess, drafts = list(tokens), []
        for k in range(luck % (self.lookahead + 1)):
            token = next_token(guess)
            drafts.append(token if (luck >> k) % 4 else (token + 1) % VOCAB)
            guess.append(drafts[-1])
        return drafts


SPEC = ModelSpec("toy", VOCAB, 1, 1, 1, 1, 1, 1, 1 << 20, "float32", eos_ids=(EOS,))


class _ToyModelPart:
    config = None

    @staticmethod
    def target() -> Any:
        return _ToyModelPart

    @staticmethod
    def spec(config: object) -> ModelSpec:
        return SPEC


class _NoHostDrafts:
    needs_host_tokens = False


class ToyComposition:
    """Stands in for a Composition: an Engine with a given scheduler and allocator on a ToyDevice."""

    def __init__(
        self,
        scheduler: Callable[[SchedulerLimits, KVAllocator], Scheduler],
        kv: Callable[[Seq[KVGroup], dict[int, int]], KVAllocator],
        device: ToyDevice,
        engine: EngineConfig,
        drafter: Drafter | None = None,
    ) -> None:
        self.engine = engine
        self.parts: dict[str, Any] = {}
        self._scheduler, self._kv, self._device, self._drafter = scheduler, kv, device, drafter

    def part(self, kind: str) -> Any:
        return _ToyModelPart

    def check(self, host: object, model_facts: object) -> None:
        """Everything fits."""

    def build(self, kind: str, **given: Any) -> Any:
        if kind == "executor":
            return self._device
        if kind == "kv_cache":
            return self._kv(given["groups"], given["num_pages"])
        if kind == "scheduler":
            return self._scheduler(given["limits"], given["kv"])
        assert kind == "spec_decode", f"an engine asked for {kind}"
        return self._drafter or _NoHostDrafts()
