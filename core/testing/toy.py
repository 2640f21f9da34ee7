"""Simulated device in pure Python that runs plans as a rank does and checks them.

Its "model" is a hash of all earlier tokens, so the right output of every request is known in advance. Its memory holds
token ids where a GPU holds keys and values, so a page that was shared, freed or copied wrongly is detected at the step
that reads it.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Container
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from dovetail.core.arithmetic import ceil_div
from dovetail.core.compose import Capabilities, EngineConfig
from dovetail.core.errors import PluginError, RequestError
from dovetail.core.interfaces import (
    Blobs,
    Drafter,
    Executor,
    ExecutorInfo,
    Grammar,
    GrammarCompiler,
    KVAllocator,
    KVGroup,
    LateInputs,
    Matcher,
    ModelSource,
    ModelSpec,
    PageOpKind,
    Progress,
    RowFlag,
    RowResult,
    Scheduler,
    SchedulerLimits,
    StepPlan,
    StepResult,
    Vocabulary,
)

VOCAB = 50
EOS = 0
"""One of VOCAB tokens, so that output lengths vary."""


def next_token(tokens: Seq[int], allowed: Container[int] = range(VOCAB)) -> int:
    """Return the toy model's greedy choice."""
    first = zlib.crc32(bytes(t % 251 for t in tokens))
    return next(t for t in ((first + i) % VOCAB for i in range(VOCAB)) if t in allowed)


class ToyMatcher(Matcher):
    """Matcher that allows tokens by a hash of the last one, for at most `length` tokens, and may end at odd lengths."""

    def __init__(self, salt: int, length: int, output: Seq[int] = ()) -> None:
        self.salt, self.length, self.output = salt, length, list(output)

    def allowed(self) -> set[int]:
        last = self.output[-1] if self.output else VOCAB
        return {t for t in range(1, VOCAB) if zlib.crc32(bytes((self.salt, last, t))) % 4 == 0 or t == 1 + last % 7}

    def mask(self, out: Any) -> None:
        out[:] = bits(self.allowed())

    def advance(self, token: int) -> None:
        if self.finished or token not in self.allowed():
            raise RequestError(f"the grammar does not allow token {token} after {self.output}")
        self.output.append(token)

    def rollback(self, tokens: int) -> None:
        del self.output[len(self.output) - tokens :]

    def forced(self) -> Seq[int]:
        """Return a guess that is right for a quarter of the states."""
        return () if self.finished else (min(self.allowed()), 1 + len(self.output) % 7)

    @property
    def accepting(self) -> bool:
        return self.finished or len(self.output) % 2 == 1

    @property
    def finished(self) -> bool:
        return len(self.output) == self.length

    def fork(self) -> Matcher:
        return ToyMatcher(self.salt, self.length, self.output)


class ToyCompiler(GrammarCompiler):
    """Compiles Grammar(kind="regex", value="<salt>:<length>") to a ToyMatcher."""

    checked = False

    def compile(self, grammar: Grammar) -> ToyMatcher:
        assert isinstance(grammar.value, str)
        salt, _, length = grammar.value.partition(":")
        return ToyMatcher(int(salt), int(length))


def bits(tokens: set[int]) -> Any:
    """Return the tokens as a uint32 mask."""
    flags = np.array([t in tokens for t in range(ceil_div(VOCAB, 32) * 32)])
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def expected_output(
    prompt: Seq[int], max_tokens: int, max_len: int, ignore_eos: bool = False, grammar: Grammar | None = None
) -> list[int]:
    """Return the output that the engine must produce with any scheduler, allocator, depth and drafter."""
    tokens = list(prompt)
    matcher = None if grammar is None else ToyCompiler(None, VOCABULARY).compile(grammar)
    while len(tokens) < min(len(prompt) + max_tokens, max_len):
        if matcher is None:
            tokens.append(next_token(tokens))
        else:
            ends = {EOS} if matcher.accepting and not ignore_eos else set()
            tokens.append(next_token(tokens, matcher.allowed() | ends))
        if tokens[-1] == EOS and not ignore_eos:
            break
        if matcher is not None:
            matcher.advance(tokens[-1])
            if matcher.finished:
                break
    return tokens[len(prompt) :]


@dataclass(slots=True)
class _Slot:
    uid: int
    epoch: int
    tokens: list[int]
    computed: int
    given: int
    """Tokens whose KV was in its pages when it joined."""
    adapter: int
    key: str
    drafts: list[int] = field(default_factory=list)
    tables: dict[int, dict[int, int]] = field(default_factory=dict)


class ToyDevice(Executor):
    """Executor of a simulated device. `delay`: number of plans queued before one runs, as on a slow device. `again`:
    tokens of a cached prefix that sequences have to feed again (SchedulerLimits.again)."""

    def __init__(
        self,
        groups: Seq[KVGroup],
        num_pages: dict[int, int],
        *,
        max_seqs: int,
        max_len: int,
        lookahead: int = 0,
        again: int = 0,
        delay: int = 0,
        adapter_slots: int = 0,
    ) -> None:
        self.groups, self.num_pages = tuple(groups), num_pages
        self.max_seqs, self.max_len, self.lookahead, self.delay = max_seqs, max_len, lookahead, delay
        self.again = again
        self.memory: dict[tuple[int, int], dict[int, int]] = {}
        """(group, page) -> offset -> token whose KV is stored there."""
        self.host: dict[tuple[int, int], dict[int, int]] = {}
        """The same for host pages."""
        self.slots: dict[int, _Slot] = {}
        self.plans: list[StepPlan] = []
        """All submitted plans, for assertions."""
        self.adapter_slots = adapter_slots
        self.adapters: dict[int, str] = {}
        """Adapter slot -> adapter."""
        self._loaded: set[str] = set()
        self._queue: deque[tuple[StepPlan, Blobs, list[str]]] = deque()
        """Plans with their blobs and the adapters to unload after them."""
        self._late: dict[int, LateInputs] = {}
        """Late inputs by step."""
        self._waiting: StepPlan | None = None
        """Newest plan while it lacks its late inputs."""
        self._results: deque[StepResult] = deque()

    def start(self, progress: Progress) -> ExecutorInfo:
        shape = self.groups, self.num_pages, self.max_len, self.lookahead
        return ExecutorInfo(SPEC, *shape, "toy", {}, adapter_slots=self.adapter_slots)

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        assert self._waiting is None, f"step {plan.step} is submitted before the late inputs of {self._waiting}"
        self.plans.append(plan)
        self._queue.append((plan, dict(blobs), []))
        if plan.late:
            self._waiting = plan
        else:
            self._run_due()

    def complete(self, late: LateInputs) -> None:
        due = self._waiting is not None and self._waiting.step == late.step
        assert due, f"late inputs of step {late.step}, but {self._waiting} waits for its own"
        for i in late.rows:
            assert self._waiting.rows[i].flags & RowFlag.LATE, f"late input for row {i} without LATE: {self._waiting}"
        self._waiting, self._late[late.step] = None, late
        self._run_due()

    def _run_due(self) -> None:
        while len(self._queue) > self.delay:
            self._run(*self._queue.popleft())

    def drafted(self) -> dict[int, tuple[int, ...]]:
        waiting = self._waiting
        assert waiting is not None, "drafts are read while a plan waits for its late inputs"
        while self._queue[0][0] is not waiting:
            self._run(*self._queue.popleft())
        for draft in waiting.drafts:
            self.slots[draft.slot].drafts = list(draft.tokens)
        rows = {i: row for i, row in enumerate(waiting.rows) if row.flags & RowFlag.LATE and row.draft}
        return {i: tuple(self.slots[row.slot].drafts[: row.draft]) for i, row in rows.items()}

    def collect(self) -> StepResult:
        assert self._waiting is None or self.pending > 1, f"collect before the late inputs of {self._waiting}"
        while not self._results:
            self._run(*self._queue.popleft())
        return self._results.popleft()

    def load_adapter(self, key: str, folder: str) -> Future[None]:
        assert key not in self._loaded, f"adapter {key} is already loaded"
        self._loaded.add(key)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def unload_adapter(self, key: str) -> None:
        if self._queue:
            self._queue[-1][2].append(key)
        else:
            self._loaded.discard(key)

    @property
    def pending(self) -> int:
        return len(self._queue) + len(self._results)

    def shutdown(self) -> None:
        self._queue.clear()

    # Device

    def _run(self, plan: StepPlan, blobs: Blobs, unloads: Seq[str]) -> None:
        where = f"step {plan.step}"
        for slot in plan.leaves:
            assert slot in self.slots, f"{where}: slot {slot} leaves but is empty"
            del self.slots[slot]
        for join in plan.joins:
            held = self.slots.get(join.slot)
            assert held is None, f"{where}: sequence {join.uid} joins slot {join.slot}, which holds {held}"
            assert 0 <= join.slot < self.max_seqs, f"{where}: slot {join.slot} of {self.max_seqs}"
            blob = blobs[join.uid, join.epoch]
            key, tokens = blob.request.adapter, list(blob.tokens)
            if key:
                assert 0 <= blob.adapter < self.adapter_slots, f"sequence {join.uid}: adapter slot {blob.adapter}"
                assert key in self._loaded, f"sequence {join.uid} joins with adapter {key}, which is not loaded"
                self.adapters[blob.adapter] = key
            again = min(self.again, join.computed)
            assert join.again == again, f"{where}: {join} must feed {again} of its computed tokens again (limits.again)"
            left = len(tokens) - join.computed
            assert left > 0, f"{where}: sequence {join.uid} joins with all {len(tokens)} tokens computed, none to feed"
            tables: dict[int, dict[int, int]] = {g.id: {} for g in self.groups}
            given = join.computed
            slot_of = _Slot(join.uid, join.epoch, tokens, given - again, given, blob.adapter, key, tables=tables)
            self.slots[join.slot] = slot_of
        for delta in plan.pages:
            last = self.num_pages[delta.group]
            assert 1 <= delta.page <= last, f"{where}: group {delta.group} has pages 1 to {last}: {delta}"
            self.slots[delta.slot].tables[delta.group][delta.index] = delta.page
        for op in plan.ops:
            read = self.host if op.kind == PageOpKind.LOAD else self.memory
            written = self.host if op.kind == PageOpKind.STORE else self.memory
            known = op.kind == PageOpKind.COPY or (op.group, op.src) in read
            assert known, f"{where}: {op} reads a page without KV"
            written[op.group, op.dst] = dict(read.get((op.group, op.src), {}))
        for draft in plan.drafts:
            self.slots[draft.slot].drafts = list(draft.tokens)
        # As in a layer, every row writes before any row reads.
        fed = {row.slot: self._write(plan, row) for row in plan.rows}
        late = self._late.pop(plan.step, None)
        allowed = {} if late is None else {row: list(map(_tokens, masks)) for row, masks in late.by_row().items()}
        results = tuple(self._read(i, row, *fed[row.slot], allowed) for i, row in enumerate(plan.rows))
        self._results.append(StepResult(plan.step, results))
        self._loaded.difference_update(unloads)

    def _write(self, plan: StepPlan, row: Any) -> tuple[int, list[int]]:
        slot = self.slots[row.slot]
        where = f"step {plan.step}, sequence {row.uid}"
        assert (slot.uid, slot.epoch) == (row.uid, row.epoch), f"{where}: slot {row.slot} holds {slot.uid}/{slot.epoch}"
        held = self.adapters[slot.adapter] if slot.key else slot.key
        assert held == slot.key, f"{where} needs adapter {slot.key}, but its adapter slot holds {held}"
        known = slot.tokens + (slot.drafts if row.flags & RowFlag.DECODE else [])
        end, length = slot.computed + row.count, len(slot.tokens)
        if row.flags & RowFlag.DECODE:
            assert slot.computed == length - 1, f"{where}: decode row with {slot.computed} of {length} tokens computed"
            assert row.count == row.draft + 1, f"{where}: a decode row must feed its drafts and one token: {row}"
        else:
            assert end <= length, f"{where}: the chunk ends at {end}, but only {length} tokens are known"
            assert row.bound == end, f"{where}: the bound of a chunk must be its end {end}: {row}"
        assert end <= row.bound <= self.max_len, f"{where}: the bound must be within {end} and {self.max_len}: {row}"
        # Padded draft positions write garbage, but must have pages too.
        feed = [known[i] if i < len(known) else -1 for i in range(slot.computed, slot.computed + row.count)]
        for group in self.groups:
            for i, token in enumerate(feed, start=slot.computed):
                index, offset = divmod(i, group.page_tokens)
                assert index in slot.tables[group.id], f"{where}: position {i} has no page in group {group.id}"
                if i < slot.given:
                    continue
                self.memory.setdefault((group.id, slot.tables[group.id][index]), {})[offset] = token
        return slot.computed, feed

    def _read(self, index: int, row: Any, start: int, feed: list[int], allowed: dict[int, list[set[int]]]) -> RowResult:
        slot = self.slots[row.slot]
        known = slot.tokens + slot.drafts[: row.draft]
        for group in self.groups:
            first = max(start - group.window + 1, 0) if group.window else 0
            for i in range(first, min(start + row.count, len(known))):
                page, offset = divmod(i, group.page_tokens)
                held = self.memory[group.id, slot.tables[group.id][page]].get(offset)
                where = f"sequence {row.uid} at position {i} of group {group.id}"
                assert held == known[i], f"{where}: expected the KV of token {known[i]}, but the page holds {held}"
        if not row.flags & RowFlag.SAMPLE:
            slot.computed += row.count
            return RowResult(index, row.uid, row.epoch)
        last = row.flags & RowFlag.DECODE or start + row.count == len(slot.tokens)
        assert last, f"{row} samples before the last of {len(slot.tokens)} known tokens"
        tokens = list(slot.tokens)
        out: list[int] = []
        masks: Seq[Container[int]] = [range(VOCAB)] * (1 + row.draft)
        if row.flags & RowFlag.LATE:
            if index not in allowed:
                slot.computed = len(tokens) - 1
                return RowResult(index, row.uid, row.epoch)
            masks = allowed[index]
        drafts = slot.drafts[: min(row.draft, len(masks) - 1)]
        for draft, mask in zip([*drafts, None], masks, strict=False):
            token = next_token(tokens, mask)
            out.append(token)
            tokens.append(token)
            if draft != token:
                break
        slot.tokens, slot.computed = tokens, len(tokens) - 1
        slot.drafts = self._draft(tokens)
        return RowResult(index, row.uid, row.epoch, tuple(out), drafted=len(drafts))

    def _draft(self, tokens: list[int]) -> list[int]:
        """Return drafts whose number and correctness depend on a hash."""
        luck = zlib.crc32(bytes(t % 251 for t in tokens), 7)
        guess, drafts = list(tokens), []
        for k in range(luck % (self.lookahead + 1)):
            token = next_token(guess)
            drafts.append(token if (luck >> k) % 4 else (token + 1) % VOCAB)
            guess.append(drafts[-1])
        return drafts


def _tokens(mask: Any) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")).tolist())


SPEC = ModelSpec("toy", VOCAB, 1, 1, 1, 1, 1, 1, 1 << 20, "float32", eos_ids=(EOS,))
VOCABULARY = Vocabulary(VOCAB, (EOS,), None)


_MODEL_PART: Any = SimpleNamespace(
    config=None,
    target=lambda: _MODEL_PART,
    spec=lambda config: SPEC,
    source=lambda config: ModelSource(None, True),
    capabilities=lambda host: Capabilities(),
    initial=lambda config: {},
)


def _fault(kind: str, reason: str) -> PluginError:
    return PluginError("under test", f"{kind}: {reason}")


class ToyComposition:
    """Replacement for a Composition: an Engine with a given scheduler and allocator on a ToyDevice."""

    def __init__(
        self,
        scheduler: Callable[[SchedulerLimits, KVAllocator], Scheduler],
        kv: Callable[[Seq[KVGroup], dict[int, int]], KVAllocator],
        device: ToyDevice,
        engine: EngineConfig,
        drafter: Drafter | None = None,
    ) -> None:
        self.engine = engine
        self.overrides = self.config_dirs = ()
        self.parts: dict[str, Any] = {"grammar": ToyCompiler}
        self._scheduler, self._kv, self._device, self._drafter = scheduler, kv, device, drafter
        self._faults = {kind: partial(_fault, kind) for kind in ("scheduler", "kv_cache")}

    def part(self, kind: str) -> Any:
        return SimpleNamespace(fault=self._faults[kind]) if kind in self._faults else _MODEL_PART

    def nodes(self) -> dict[str, Any]:
        return {"engine": self.engine.model_dump(mode="json")}

    def check(self, host: object, model_facts: object) -> None:
        """Accept every combination."""

    def build(self, kind: str, **given: Any) -> Any:
        if kind == "executor":
            return self._device
        if kind == "kv_cache":
            return self._kv(given["groups"], given["num_pages"])
        if kind == "scheduler":
            return self._scheduler(given["limits"], given["kv"])
        if kind == "grammar":
            return ToyCompiler(None, given["vocabulary"])
        assert kind == "spec_decode", f"unexpected component kind {kind}"
        lookahead = self._device.lookahead
        return self._drafter or SimpleNamespace(
            lookahead=lookahead,
            depth=lookahead,
            needs_host_tokens=False,
            verify="draws",
            follows_features=self._device.again > 0,
            draft_counts=(lookahead,),
            catches_up=False,
            window=None,
            resumes=True,
        )
