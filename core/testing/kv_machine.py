"""Hypothesis state machine that drives an allocator as an engine with plans in flight does.

Sequences arrive, enter, prefill in chunks, decode with drafts, receive their tokens late, publish late, fork, roll
back, and are preempted and resumed. Every outcome is applied to a ShadowMemory. After every rule each sequence must
read its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import Hit, KVAllocator, KVGroup
from dovetail.core.testing.kv_model import GARBAGE, LAYOUTS, SLIDING, Layout, Prefixes, ShadowMemory, TokenSequence

Factory = Callable[[Sequence[KVGroup], Mapping[int, int]], KVAllocator]

PICK = st.integers(0, 5)
TOKEN = st.integers(0, 1)
SALT = st.sampled_from(("", "", "other"))
PROMPT = st.builds(
    # Two families, so that prompts often share a prefix and then diverge.
    lambda family, length, tail: [family] * length + tail,
    TOKEN,
    st.integers(0, 24),
    st.lists(TOKEN, min_size=1, max_size=3),
)


@dataclass(slots=True)
class Run:
    """One sequence as the engine and the device see it. `seq` is the host's view."""

    seq: TokenSequence
    true: list[int]
    """Tokens on the device: the host's and those whose results are still pending."""
    running: bool = False
    fed: int = 0
    """Number of tokens whose KV is written once every launched plan has run."""
    bound: int = 0
    """Upper bound of `fed` on the host."""
    reserved: int = 0
    written: int = 0
    """The contract's "written so far"."""
    late: list[tuple[list[int], int]] = field(default_factory=list)
    """Pending results: new tokens, and by how much they lower the bound."""


@dataclass(slots=True)
class Call:
    """One call with its inputs and outcome, to be repeated on a fresh allocator."""

    method: str
    sequences: list[tuple[int, list[int], str, int]]
    arguments: dict[str, Any]
    outcome: object


def make_kv_state_machine(
    factory: Factory,
    layouts: Sequence[Layout] = (*LAYOUTS.values(), *SLIDING.values()),
    *,
    contiguous: bool = False,
    slides: bool = True,
) -> type[KVMachine]:
    """Return the machine for one kind of allocator. Its `.TestCase` is a test class; run_state_machine_as_test runs it.

    contiguous: pages of a sequence must be consecutive, and reserve may fail when no free run is long enough.
    slides: pages behind a window must be freed; otherwise they must be kept."""
    body = {"factory": staticmethod(factory), "layouts": tuple(layouts), "contiguous": contiguous, "slides": slides}
    return type("KVMachine", (KVMachine,), body)


class KVMachine(RuleBasedStateMachine):
    factory: Factory
    layouts: tuple[Layout, ...]
    contiguous: bool
    slides: bool

    @initialize(number=st.integers(0, 5), prompts=st.lists(PROMPT, min_size=1, max_size=4))
    def start(self, number: int, prompts: list[list[int]]) -> None:
        self.layout = self.layouts[number % len(self.layouts)]
        self.kv = self.factory(self.layout.groups, self.layout.num_pages)
        self.memory = ShadowMemory(self.layout)
        self.prefixes = Prefixes()
        self.runs: list[Run] = []
        self.calls: list[Call] = []
        self.next_uid = 0
        for prompt in prompts:
            self.serve(prompt, "", keep=True)

    # Rules

    @precondition(lambda self: len(self.runs) < 6)
    @rule(prompt=PROMPT, salt=SALT)
    def arrive(self, prompt: list[int], salt: str) -> None:
        self.runs.append(Run(self._sequence(prompt, salt), list(prompt)))

    @precondition(lambda self: len(self.runs) < 6)
    @rule(prompt=PROMPT, salt=SALT, keep=st.booleans())
    def serve(self, prompt: list[int], salt: str, keep: bool) -> None:
        """Arrive, enter, prefill and publish at once. Then finish, or keep running."""
        run = Run(self._sequence(prompt, salt), list(prompt))
        self._enter(run, reuse=True)
        if self._feed(run, len(prompt), drafts=0, accepted=0, token=prompt[-1]):
            self._publish(run, len(prompt))
        if keep:
            self.runs.append(run)
        else:
            self._release(run, twice=False)

    @precondition(lambda self: any(not run.running and not run.late for run in self.runs))
    @rule(pick=PICK, reuse=st.sampled_from((True, True, True, False)), ahead=st.booleans())
    def enter(self, pick: int, reuse: bool, ahead: bool) -> None:
        """Enter with pages for the whole prompt, or without any."""
        run = self._pick(pick, lambda run: not run.running and not run.late)
        self._enter(run, reuse)
        if ahead:
            self._reserve(run, len(run.seq.tokens))

    @precondition(lambda self: any(run.running for run in self.runs))
    @rule(pick=PICK, count=st.integers(1, 16), drafts=st.integers(0, 5), accepted=st.integers(0, 5), token=TOKEN)
    def launch(self, pick: int, count: int, drafts: int, accepted: int, token: int) -> None:
        self._feed(self._pick(pick, lambda run: run.running), count, drafts, accepted, token)

    @precondition(lambda self: any(run.running for run in self.runs))
    @rule(pick=PICK, steps=st.integers(2, 12), depth=st.integers(0, 3), token=TOKEN)
    def decode(self, pick: int, steps: int, depth: int, token: int) -> None:
        """Run some steps with up to `depth` results pending, and publish known tokens."""
        run = self._pick(pick, lambda run: run.running)
        for _ in range(steps):
            if not self._feed(run, 16, drafts=0, accepted=0, token=token):
                return
            while len(run.late) > depth:
                self._take_result(run)
            self._publish(run, min(len(run.seq.tokens), run.fed))

    @precondition(lambda self: any(run.running for run in self.runs))
    @rule(pick=PICK, more=st.integers(0, 40))
    def reserve_ahead(self, pick: int, more: int) -> None:
        run = self._pick(pick, lambda run: run.running)
        self._reserve(run, run.bound + more)

    @precondition(lambda self: any(run.late for run in self.runs))
    @rule(pick=PICK)
    def result(self, pick: int) -> None:
        self._take_result(self._pick(pick, lambda run: bool(run.late)))

    @precondition(lambda self: any(run.running for run in self.runs))
    @rule(pick=PICK, lag=st.sampled_from((0, 0, 1, 5)))
    def publish(self, pick: int, lag: int) -> None:
        run = self._pick(pick, lambda run: run.running)
        self._publish(run, max(min(len(run.seq.tokens), run.fed) - lag, 0))

    @precondition(lambda self: len(self.runs) < 6 and any(run.running and run.fed for run in self.runs))
    @rule(pick=PICK, cut=st.integers(0, 20), token=TOKEN)
    def fork(self, pick: int, cut: int, token: int) -> None:
        parent = self._pick(pick, lambda run: run.running and run.fed > 0)
        upto = max(min(parent.fed, len(parent.seq.tokens)) - cut, 1)
        tokens = [*parent.seq.tokens[:upto], token]
        child = Run(self._sequence(tokens, parent.seq.salt), list(tokens), running=True)
        before = self.kv.stats()
        passed = upto < self.memory.shortest(parent.seq.uid)
        expected = self.kv.peek(child.seq) if passed else upto
        hit = self._call("fork", parent.seq, child.seq, upto=upto)
        assert hit.tokens == expected, f"fork({upto}): expected {expected} tokens, got {hit.tokens}"
        assert passed or self.kv.stats().owned == before.owned, "fork must share pages and take no new ones"
        self._take_hit(child, hit)
        self.runs.append(child)

    @precondition(lambda self: any(run.running for run in self.runs))
    @rule(pick=PICK)
    def trim_unused(self, pick: int) -> None:
        run = self._pick(pick, lambda run: run.running)
        self._trim(run, run.bound)

    @precondition(lambda self: any(run.running and run.fed and not run.late for run in self.runs))
    @rule(pick=PICK, cut=st.integers(0, 20), token=TOKEN)
    def roll_back(self, pick: int, cut: int, token: int) -> None:
        """Drop the last tokens and continue with another one."""
        run = self._pick(pick, lambda run: run.running and run.fed > 0 and not run.late)
        length = max(run.fed - cut, 1, self.memory.shortest(run.seq.uid))
        self._trim(run, length)
        run.seq.tokens[length:] = [token]
        run.true[length:] = [token]
        run.fed = run.bound = length

    @precondition(lambda self: any(run.running for run in self.runs))
    @rule(pick=PICK, twice=st.booleans())
    def preempt(self, pick: int, twice: bool) -> None:
        run = self._pick(pick, lambda run: run.running)
        self._release(run, twice)
        run.running = False

    @precondition(lambda self: bool(self.runs))
    @rule(pick=PICK, twice=st.booleans())
    def finish(self, pick: int, twice: bool) -> None:
        run = self._pick(pick, lambda run: True)
        self._release(run, twice)
        self.runs.remove(run)

    @precondition(lambda self: self.kv.stats().cached > 4)
    @rule()
    def reset(self) -> None:
        try:
            self._call("reset")
        except NotImplementedError:
            return
        assert self.kv.stats().cached == 0, f"no page may be cached after reset, got {self.kv.stats().cached}"

    # Invariants

    @invariant()
    def each_sequence_reads_its_own_tokens(self) -> None:
        for run in self.runs if hasattr(self, "kv") else ():
            if run.running:
                self.memory.expect(run.seq.uid, self.prefixes.of(run.seq.salt, run.true[: run.fed]))
                for table in self.memory.tables[run.seq.uid].values() if self.contiguous else ():
                    assert all(b == a + 1 for a, b in pairwise(table)), f"pages {table} must be consecutive"

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        stats = self.kv.stats()
        owned = sum(len(self.memory.owners(group.id)) for group in self.layout.groups)
        assert stats.owned == owned, f"stats() counts {stats.owned} owned pages, but page tables name {owned}"
        total = sum(self.layout.num_pages.values())
        assert stats.pages == total == stats.free + stats.cached + stats.owned, f"pages do not add up: {stats}"
        used = self._used_slots()
        assert stats.used_tokens == used, f"stats() counts {stats.used_tokens} used slots, but {used} are reserved"

    def teardown(self) -> None:
        """Repeat all calls on a fresh allocator; the outcomes must be equal."""
        if not hasattr(self, "kv"):
            return
        kv = self.factory(self.layout.groups, self.layout.num_pages)
        known: dict[int, TokenSequence] = {}
        for number, call in enumerate(self.calls):
            sequences = []
            for uid, tokens, salt, limit in call.sequences:
                seq = known.setdefault(uid, TokenSequence(uid, [], salt, limit))
                seq.tokens[:] = tokens
                sequences.append(seq)
            again = getattr(kv, call.method)(*sequences, **call.arguments)
            assert again == call.outcome, (
                f"an allocator must be deterministic, but call {number}, {call.method}, returned {call.outcome}, "
                f"and on a fresh allocator {again}"
            )

    # Helpers.

    def _sequence(self, tokens: list[int], salt: str) -> TokenSequence:
        self.next_uid += 1
        # Limits vary: far above, near, and far below the final length.
        return TokenSequence(self.next_uid, list(tokens), salt, limit=len(tokens) + self.next_uid * 7 % 20)

    def _pick(self, number: int, wanted: Callable[[Run], bool]) -> Run:
        candidates = [run for run in self.runs if wanted(run)]
        return candidates[number % len(candidates)]

    def _call(self, method: str, *sequences: TokenSequence, **arguments: Any) -> Any:
        seen = [(seq.uid, list(seq.tokens), seq.salt, seq.limit) for seq in sequences]
        outcome = getattr(self.kv, method)(*sequences, **arguments)
        self.calls.append(Call(method, seen, arguments, outcome))
        return outcome

    def _enter(self, run: Run, reuse: bool) -> None:
        found = self._call("peek", run.seq)
        stats = self.kv.stats()
        assert found == self.kv.peek(run.seq) and stats == self.kv.stats(), "peek must change nothing"
        hit = self._call("acquire", run.seq, reuse=reuse)
        expected = found if reuse else 0
        assert hit.tokens == expected, f"peek found {found}, acquire(reuse={reuse}) found {hit.tokens} tokens"
        assert hit.tokens < len(run.seq.tokens), f"a hit must leave one token to feed, but has all {hit.tokens}"
        self._take_hit(run, hit)
        run.running = True
        self.memory.expect(run.seq.uid, self.prefixes.of(run.seq.salt, run.seq.tokens[: hit.tokens]))

    def _take_hit(self, run: Run, hit: Hit) -> None:
        self.memory.apply(run.seq.uid, hit.entries, hit.ops)
        if self.slides:
            self.memory.slide(run.seq.uid, hit.tokens)
        run.fed = run.bound = run.reserved = run.written = hit.tokens

    def _feed(self, run: Run, count: int, drafts: int, accepted: int, token: int) -> bool:
        """Launch a chunk of the prompt, or a decode row of whose drafts some are accepted."""
        remaining = len(run.true) - run.fed
        if remaining > 1:
            drafts, count = 0, min(count, remaining)
        else:
            count = 1
        if not self._reserve(run, run.bound + count + drafts):
            return False
        accepted = min(accepted, drafts)
        new = [token] * (accepted + 1) if count == remaining else []
        self._write(run, run.fed, (run.true + new)[: run.fed + count + accepted], garbage=drafts - accepted)
        run.true += new
        run.fed += count + accepted
        run.bound += count + drafts
        if new:
            run.late.append((new, drafts - accepted))
        return True

    def _take_result(self, run: Run) -> None:
        new, surplus = run.late.pop(0)
        run.seq.tokens += new
        if run.running:
            run.bound -= surplus

    def _publish(self, run: Run, upto: int) -> None:
        self._call("publish", run.seq, upto=upto)
        if self.slides:
            self.memory.slide(run.seq.uid, upto - 1)
        run.written = max(run.written, upto)

    def _reserve(self, run: Run, upto: int) -> bool:
        before = self.kv.stats()
        made = self._call("reserve", run.seq, upto=upto)
        if made is None:
            assert self.kv.stats() == before, f"a failed reserve must change nothing: {before}, now {self.kv.stats()}"
            assert self._too_many(run, upto), f"reserve({upto}) failed although there are enough pages: {before}"
            return False
        self.memory.apply(run.seq.uid, made.entries, made.ops)
        run.reserved = max(run.reserved, upto)
        after = self.kv.stats()
        again = self.kv.reserve(run.seq, upto)
        empty = again is not None and not again.entries and not again.ops
        assert empty, f"a second reserve({upto}) must return an empty Reservation, got {again}"
        assert self.kv.stats() == after, "a second reserve must change nothing"
        return True

    def _too_many(self, run: Run, upto: int) -> bool:
        """Whether some group lacks pages, copies of shared pages that may be written included."""
        for group in self.layout.groups:
            owners, table = self.memory.owners(group.id), self.memory.tables[run.seq.uid][group.id]
            wanted = ceil_div(upto, group.page_tokens)
            if self.contiguous:
                free = (page not in owners for page in range(1, self.layout.num_pages[group.id] + 1))
                longest = max((len(list(same)) for is_free, same in groupby(free) if is_free), default=0)
                if longest < ceil_div(max(upto, run.seq.limit), group.page_tokens):
                    return True
                continue
            shared = sum(owners[page] > 1 for page in table[run.written // group.page_tokens : wanted])
            if max(wanted - len(table), 0) + shared > self.layout.num_pages[group.id] - len(owners):
                return True
        return False

    def _write(self, run: Run, start: int, tokens: list[int], garbage: int) -> None:
        contents = self.prefixes.of(run.seq.salt, tokens)[start:] + [GARBAGE] * garbage
        for group in self.layout.groups:
            table, owners = self.memory.tables[run.seq.uid][group.id], self.memory.owners(group.id)
            end = ceil_div(start + len(contents), group.page_tokens)
            assert end <= len(table), f"group {group.id}: no page is reserved for position {start + len(contents) - 1}"
            shared = [page for page in table[start // group.page_tokens : end] if owners[page] > 1]
            assert not shared, f"group {group.id}: sequence {run.seq.uid} would write to shared pages {shared}"
        self.memory.write(run.seq.uid, start, contents)

    def _trim(self, run: Run, length: int) -> None:
        self._call("trim", run.seq, length=length)
        self.memory.trim(run.seq.uid, length)
        run.reserved, run.written = min(run.reserved, length), min(run.written, length)

    def _release(self, run: Run, twice: bool) -> None:
        self._call("release", run.seq)
        if twice:
            self._call("release", run.seq)
        self.memory.drop(run.seq.uid)

    def _used_slots(self) -> int:
        used: dict[tuple[int, int], int] = {}
        for run in self.runs:
            if not run.running:
                continue
            for group in self.layout.groups:
                for index, page in enumerate(self.memory.tables[run.seq.uid][group.id]):
                    if not page:
                        continue
                    slots = min(run.reserved - index * group.page_tokens, group.page_tokens)
                    used[group.id, page] = max(used.get((group.id, page), 0), slots)
        return sum(used.values())
