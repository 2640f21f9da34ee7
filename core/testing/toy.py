"""A device made of Python lists: runs plans exactly as a rank would, without a model, and checks what a GPU could not.

Its "model" is a hash of everything before a token, so the right output of every request is known in advance; its
memory holds token ids where a GPU holds keys and values, so a page that was shared, freed or copied wrongly is found
at the step that reads it.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Container
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dovetail.core.arithmetic import ceil_div
from dovetail.core.compose import Capabilities, EngineConfig
from dovetail.core.errors import RequestError
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
"""One token in VOCAB ends an output, so lengths vary."""


def next_token(tokens: Seq[int], allowed: Container[int] = range(VOCAB)) -> int:
    """The toy model, greedy."""
    first = zlib.crc32(bytes(t % 251 for t in tokens))
    return next(t for t in ((first + i) % VOCAB for i in range(VOCAB)) if t in allowed)


class ToyMatcher(Matcher):
    """Allows some tokens after each token, chosen by a hash; of `length` tokens at most; may end after every other."""

    def __init__(self, salt: int, length: int, output: Seq[int] = ()) -> None:
        self.salt, self.length, self.output = salt, length, list(output)

    def allowed(self) -> set[int]:
        last = self.output[-1] if self.output else VOCAB
        return {t for t in range(1, VOCAB) if zlib.crc32(bytes((self.salt, last, t))) % 4 == 0 or t == 1 + last % 7}

    def mask(self, out: Any) -> None:
        out[:] = bits(self.allowed())

    def advance(self, token: int) -> None:
        if self.finished or token not in self.allowed():
            raise RequestError(f"token {token} may not follow {self.output}")
        self.output.append(token)

    @property
    def accepting(self) -> bool:
        return self.finished or len(self.output) % 2 == 1

    @property
    def finished(self) -> bool:
        return len(self.output) == self.length

    def fork(self) -> Matcher:
        return ToyMatcher(self.salt, self.length, self.output)


class ToyCompiler(GrammarCompiler):
    """Grammar(kind="regex", value="<salt>:<length>") becomes a ToyMatcher."""

    def compile(self, grammar: Grammar) -> ToyMatcher:
        assert isinstance(grammar.value, str)
        salt, _, length = grammar.value.partition(":")
        return ToyMatcher(int(salt), int(length))


def bits(tokens: set[int]) -> Any:
    """As a mask, uint32."""
    flags = np.array([t in tokens for t in range(ceil_div(VOCAB, 32) * 32)])
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def expected_output(
    prompt: Seq[int], max_tokens: int, max_len: int, ignore_eos: bool = False, grammar: Grammar | None = None
) -> list[int]:
    """What the engine must produce, whatever scheduler, allocator, depth or drafter."""
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
    adapter: int
    key: str
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
        adapter_slots: int = 0,
    ) -> None:
        self.groups, self.num_pages = tuple(groups), num_pages
        self.max_seqs, self.max_len, self.lookahead, self.delay = max_seqs, max_len, lookahead, delay
        self.memory: dict[tuple[int, int], dict[int, int]] = {}
        """(group, page) -> offset -> the token whose KV stands there."""
        self.host: dict[tuple[int, int], dict[int, int]] = {}
        """The same of host pages."""
        self.slots: dict[int, _Slot] = {}
        self.plans: list[StepPlan] = []
        """Every plan submitted, for assertions."""
        self.adapter_slots = adapter_slots
        self.adapters: dict[int, str] = {}
        """Adapter slot -> what it holds."""
        self._loaded: set[str] = set()
        """Adapters that were loaded."""
        self._queue: deque[tuple[StepPlan, Blobs, list[str]]] = deque()
        """With adapters to forget after the plan."""
        self._late: dict[int, LateInputs] = {}
        """By step."""
        self._waiting: StepPlan | None = None
        """The newest plan, while it lacks its late inputs."""
        self._results: deque[StepResult] = deque()

    def start(self, progress: Progress) -> ExecutorInfo:
        return ExecutorInfo(
            SPEC,
            self.groups,
            self.num_pages,
            self.max_len,
            self.lookahead,
            "toy",
            {},
            adapter_slots=self.adapter_slots,
        )

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        assert self._waiting is None, f"step {plan.step} comes before the late inputs of {self._waiting}"
        self.plans.append(plan)
        self._queue.append((plan, dict(blobs), []))
        if plan.late:
            self._waiting = plan
        else:
            self._run_due()

    def complete(self, late: LateInputs) -> None:
        assert self._waiting is not None and self._waiting.step == late.step, f"{self._waiting} waits, not {late.step}"
        for i in late.rows:
            assert self._waiting.rows[i].flags & RowFlag.LATE, f"row {i} wants no late input: {self._waiting}"
        self._waiting, self._late[late.step] = None, late
        self._run_due()

    def _run_due(self) -> None:
        while len(self._queue) > self.delay:
            self._run(*self._queue.popleft())

    def collect(self) -> StepResult:
        assert self._waiting is None or self.pending > 1, f"{self._waiting} lacks its late inputs"
        while not self._results:
            self._run(*self._queue.popleft())
        return self._results.popleft()

    def load_adapter(self, key: str, folder: str) -> Future[None]:
        assert key not in self._loaded, f"adapter {key} is loaded twice"
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

    # The device.

    def _run(self, plan: StepPlan, blobs: Blobs, unloads: Seq[str]) -> None:
        for slot in plan.leaves:
            assert slot in self.slots, f"step {plan.step}: slot {slot} leaves and nobody is there"
            del self.slots[slot]
        for join in plan.joins:
            assert join.slot not in self.slots, (
                f"step {plan.step}: slot {join.slot} is taken by {self.slots[join.slot].uid}"
            )
            assert 0 <= join.slot < self.max_seqs, f"slot {join.slot} of {self.max_seqs}"
            blob = blobs[join.uid, join.epoch]
            key, tokens = blob.request.adapter, list(blob.tokens)
            if key:
                assert 0 <= blob.adapter < self.adapter_slots, f"sequence {join.uid}: adapter slot {blob.adapter}"
                assert key in self._loaded, f"sequence {join.uid} joins with {key}, which is not loaded"
                self.adapters[blob.adapter] = key
            assert join.computed < len(tokens), (
                f"sequence {join.uid}: {join.computed} of {len(tokens)} tokens given, none to feed"
            )
            self.slots[join.slot] = _Slot(
                join.uid,
                join.epoch,
                tokens,
                join.computed,
                blob.adapter,
                key,
                tables={g.id: {} for g in self.groups},
            )
        for delta in plan.pages:
            assert 1 <= delta.page <= self.num_pages[delta.group], f"page {delta.page} of group {delta.group}"
            self.slots[delta.slot].tables[delta.group][delta.index] = delta.page
        for op in plan.ops:
            read = self.host if op.kind == PageOpKind.LOAD else self.memory
            written = self.host if op.kind == PageOpKind.STORE else self.memory
            assert op.kind == PageOpKind.COPY or (op.group, op.src) in read, (
                f"step {plan.step}: {op} of a page without KV"
            )
            written[op.group, op.dst] = dict(read.get((op.group, op.src), {}))
        # As layers do: every row writes before any row reads.
        fed = {row.slot: self._write(plan, row) for row in plan.rows}
        late = self._late.pop(plan.step, None)
        allowed = (
            {} if late is None else {row: _tokens(mask) for row, mask in zip(late.rows, late.masks_MW, strict=True)}
        )
        results = tuple(self._read(i, row, *fed[row.slot], allowed) for i, row in enumerate(plan.rows))
        self._results.append(StepResult(plan.step, results))
        self._loaded.difference_update(unloads)

    def _write(self, plan: StepPlan, row: Any) -> tuple[int, list[int]]:
        slot = self.slots[row.slot]
        where = f"step {plan.step}, sequence {row.uid}"
        assert (slot.uid, slot.epoch) == (row.uid, row.epoch), f"{where}: slot {row.slot} holds {slot.uid}/{slot.epoch}"
        assert not slot.key or self.adapters[slot.adapter] == slot.key, (
            f"{where} runs with {slot.key}, and its adapter slot holds {self.adapters[slot.adapter]}"
        )
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

    def _read(self, index: int, row: Any, start: int, feed: list[int], allowed: dict[int, set[int]]) -> RowResult:
        slot = self.slots[row.slot]
        known = slot.tokens + slot.drafts[: row.draft]
        for group in self.groups:
            first = max(start - group.window + 1, 0) if group.window else 0
            for i in range(first, min(start + row.count, len(known))):
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
        if row.flags & RowFlag.LATE:
            assert row.draft == 0, f"{row} has drafts, which its mask does not know of"
            if index not in allowed:
                slot.computed = len(tokens) - 1
                return RowResult(index, row.uid, row.epoch)
        for draft in [*slot.drafts[: row.draft], None]:
            token = next_token(tokens, allowed.get(index, range(VOCAB)))
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


def _tokens(mask: Any) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")).tolist())


SPEC = ModelSpec("toy", VOCAB, 1, 1, 1, 1, 1, 1, 1 << 20, "float32", eos_ids=(EOS,))
VOCABULARY = Vocabulary(VOCAB, (EOS,), None)


class _ToyModelPart:
    config = None

    @staticmethod
    def target() -> Any:
        return _ToyModelPart

    @staticmethod
    def spec(config: object) -> ModelSpec:
        return SPEC

    @staticmethod
    def source(config: object) -> ModelSource:
        return ModelSource(None, True)

    @staticmethod
    def capabilities(host: object) -> Capabilities:
        return Capabilities()

    @staticmethod
    def initial(config: object) -> dict[str, str]:
        return {}


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
        self.parts: dict[str, Any] = {"grammar": ToyCompiler}
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
        if kind == "grammar":
            return ToyCompiler(None, given["vocabulary"])
        assert kind == "spec_decode", f"an engine asked for {kind}"
        return self._drafter or _NoHostDrafts()
