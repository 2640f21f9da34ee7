"""Contract suite for drafters. Subclass DrafterContract in a test module and override `make`.

Shapes: B rows, S slots, L tokens, K drafts, V vocabulary, T tokens of a step, C channels.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import pytest
import torch

from dovetail.core.interfaces import Draft, DraftContext, Drafter, ModelSpec, TargetView
from dovetail.core.ops.step import accept
from dovetail.core.testing.host_sync import NoHostSync
from dovetail.core.worker.sampler import SampleParams, VerifiedDrafts, sample, verify_rejection

HIDDEN = 8
Histories = Mapping[int, Seq[int]]
"""slot -> known tokens."""


@dataclass(frozen=True)
class Guesses:
    """Drafts for one row, without the ignored entries."""

    tokens: tuple[int, ...]
    probs_KV: torch.Tensor | None = None
    tree: bool = False

    def same(self, other: Guesses) -> bool:
        if self.tokens != other.tokens or (self.probs_KV is None) != (other.probs_KV is None):
            return False
        return self.probs_KV is None or torch.allclose(self.probs_KV, other.probs_KV, atol=1e-5)


class DrafterContract:
    """Tests of the rules of dovetail.core.interfaces.Drafter, over a small target. Only `make` must be overridden."""

    vocab = 8
    """Vocabulary size of the target; small, so that counting can distinguish distributions."""
    slots = 6
    max_len = 40

    def make(self) -> Drafter:
        """Return a fresh, unbound drafter. Every call must return an equal one."""
        raise NotImplementedError("return your drafter: MyDrafter(MyConfig(...))")

    def target(self, slots: int) -> TargetView:
        """Return the argument of `bind`. Override for a drafter that needs more than embeddings and logits."""
        generator = torch.Generator().manual_seed(1)
        table_VC = torch.randn(self.vocab, HIDDEN, generator=generator)
        spec = ModelSpec("small", self.vocab, 2, HIDDEN, 2, 2, HIDDEN // 2, HIDDEN, self.max_len, "float32")
        return TargetView(
            spec=spec,
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_seqs=slots,
            max_len=self.max_len,
            embed=lambda tokens_T: table_VC[tokens_T.long()],
            logits=lambda states_BC: states_BC.float() @ table_VC.T,
        )

    # Drivers

    def bound(self, slots: int | None = None) -> Drafter:
        drafter = self.make()
        drafter.bind(self.target(slots or self.slots))
        return drafter

    def asked(self, slots: int | None = None) -> Drafter:
        """Return a bound drafter that proposes drafts (lookahead > 0)."""
        drafter = self.bound(slots)
        if drafter.lookahead == 0:
            pytest.skip("lookahead = 0: no drafts")
        return drafter

    def on_device(self) -> Drafter:
        drafter = self.asked()
        if drafter.needs_host_tokens:
            pytest.skip("needs_host_tokens = True: drafts come from the host")
        return drafter

    def context(
        self,
        histories: Histories,
        k: int,
        lookahead: int,
        *,
        poison: int = 0,
        slack: int = 0,
        slots: int | None = None,
        keys: torch.Tensor | None = None,
    ) -> DraftContext:
        """Build the context. Tokens that the drafter must not read depend on `poison`. keys: int64 [slots]; None = each
        sequence has a key of its own, whatever its slot."""
        generator = torch.Generator().manual_seed(poison)
        width = self.max_len + 2 * lookahead + 1
        tokens_SL = torch.randint(
            self.vocab, ((slots or self.slots) + 1, width), generator=generator, dtype=torch.int32
        )
        key_S = torch.randint(1 << 60, (len(tokens_SL),), generator=generator)
        for slot, history in histories.items():
            tokens_SL[slot, : len(history)] = torch.tensor(history, dtype=torch.int32)
            key_S[slot] = zlib.crc32(bytes(history)) if keys is None else keys[slot]
        lengths = [len(history) for history in histories.values()]
        slots_B = torch.tensor(list(histories), dtype=torch.int64)
        return DraftContext(
            slots_B=slots_B,
            tokens_SL=tokens_SL,
            lengths_B=torch.tensor(lengths, dtype=torch.int32),
            max_length=max(lengths) + slack,
            k=k,
            key_S=key_S,
            slots_T=slots_B,
            positions_T=torch.tensor(lengths) - 1,
        )

    def observe(self, drafter: Drafter, ctx: DraftContext, chunk: int = 1) -> None:
        """Call drafter.observe with `chunk` hidden states per row that depend on the row's tokens."""
        states = []
        for slot, length in zip(ctx.slots_B.tolist(), ctx.lengths_B.tolist(), strict=True):
            seed = zlib.crc32(bytes(ctx.tokens_SL[slot, :length].tolist()))
            states.append(torch.randn(chunk, HIDDEN, generator=torch.Generator().manual_seed(seed)))
        hidden_TC = torch.cat(states)
        drafter.observe(ctx, hidden_TC, {layer: hidden_TC + layer for layer in drafter.taps})

    @torch.inference_mode()
    def step(self, drafter: Drafter, ctx: DraftContext) -> list[Guesses]:
        """Run one engine step: the drafter observes hidden states, then proposes."""
        self.observe(drafter, ctx)
        if drafter.needs_host_tokens:
            rows = zip(ctx.slots_B.tolist(), ctx.lengths_B.tolist(), strict=True)
            known = [ctx.tokens_SL[slot, :length].tolist() for slot, length in rows]
            return [Guesses(tuple(drafter.propose_host(tokens, ctx.k))) for tokens in known]
        return _rows(drafter.propose(ctx))

    def guess(self, histories: Histories, k: int | None = None, *, poison: int = 0, slack: int = 0) -> list[Guesses]:
        """Return the drafts of a fresh drafter."""
        drafter = self.asked()
        k = drafter.lookahead if k is None else k
        return self.step(drafter, self.context(histories, k, drafter.lookahead, poison=poison, slack=slack))

    def proposals(self, drafter: Drafter) -> Iterator[tuple[int, int, Draft]]:
        """Yield (k, rows, draft) for every k and load."""
        for k in range(1, drafter.lookahead + 1):
            for histories in self.loads():
                ctx = self.context(histories, k, drafter.lookahead)
                with torch.inference_mode():
                    self.observe(drafter, ctx)
                    draft = drafter.propose(ctx)
                yield k, len(histories), draft

    def loads(self) -> Iterable[Histories]:
        """Yield batches of every size with slots in random order. Some rows repeat themselves, so that lookups hit."""
        rng = random.Random(5)
        for size in range(1, self.slots + 1):
            slots = rng.sample(range(self.slots), size)
            yield {slot: self.history(rng) for slot in slots}

    def history(self, rng: random.Random) -> list[int]:
        tokens = [rng.randrange(self.vocab) for _ in range(rng.randrange(1, self.max_len // 2))]
        return (tokens * 8)[: rng.randrange(1, self.max_len + 1)]

    # Properties

    def test_lookahead_is_one_number_from_the_start(self) -> None:
        drafter = self.make()
        lookahead = drafter.lookahead
        assert isinstance(lookahead, int) and lookahead >= 0, f"lookahead must be an int >= 0, got {lookahead!r}"
        drafter.bind(self.target(self.slots))
        assert drafter.lookahead == lookahead, "`bind` changed lookahead, but the engine has already sized its tables"
        if lookahead:
            self.step(drafter, self.context({0: [1, 2, 1]}, lookahead, lookahead))
            assert drafter.lookahead == lookahead, "a step changed lookahead"
        assert self.make().lookahead == lookahead, "two equal drafters must have the same lookahead"

    def test_its_kv_groups_have_distinct_ids(self) -> None:
        ids = [group.id for group in self.bound().kv_groups()]
        assert len(set(ids)) == len(ids), f"KV group ids must be distinct, got {ids}"

    # Drafts

    def test_shapes_dtypes_and_counts(self) -> None:
        for k, rows, draft in self.proposals(self.on_device()):
            _assert_int32("tokens_BK", draft.tokens_BK, (rows, k))
            _assert_int32("count_B", draft.count_B, (rows,))
            in_range = 0 <= int(draft.count_B.min()) and int(draft.count_B.max()) <= k
            assert in_range, f"count_B must be within 0 to k = {k}, got {draft.count_B.tolist()}"
            for guesses in _rows(draft):
                known = all(0 <= t < self.vocab for t in guesses.tokens)
                assert known, f"drafts must be token ids below {self.vocab}, got {guesses.tokens}"
            if draft.parents_BK is not None:
                _assert_int32("parents_BK", draft.parents_BK, (rows, k))
                for parents, count in zip(draft.parents_BK.tolist(), draft.count_B.tolist(), strict=True):
                    ordered = all(-1 <= p < i for i, p in enumerate(parents[:count]))
                    assert ordered, f"a parent must precede its node (-1 = the last accepted token), got {parents}"

    def test_probabilities_are_a_distribution_that_holds_the_guess(self) -> None:
        for k, rows, draft in self.proposals(self.on_device()):
            if draft.probs_BKV is None:
                pytest.skip("probs_BKV = None: drafts are point masses")
            shape, dtype = tuple(draft.probs_BKV.shape), draft.probs_BKV.dtype
            assert shape == (rows, k, self.vocab), f"probs_BKV must be [B, K, V] {(rows, k, self.vocab)}, got {shape}"
            assert dtype == torch.float32, f"probs_BKV must be float32, got {dtype}"
            for guesses in _rows(draft):
                probs_KV = guesses.probs_KV
                assert bool((probs_KV >= 0).all()), f"probabilities must not be negative: {probs_KV}"
                sums_K = probs_KV.sum(-1)
                assert torch.allclose(sums_K, torch.ones_like(sums_K), atol=1e-4), f"each q must sum to 1, got {sums_K}"
                drawn = probs_KV.gather(1, torch.tensor(guesses.tokens, dtype=torch.int64)[:, None])
                assert bool((drawn > 0).all()), f"q of the drafts {guesses.tokens} must be positive, got {drawn}"

    def test_host_guesses_are_at_most_k_tokens(self) -> None:
        drafter = self.asked()
        if not drafter.needs_host_tokens:
            pytest.skip("needs_host_tokens = False: drafts come from the device")
        rng = random.Random(6)
        for k in range(1, drafter.lookahead + 1):
            for _ in range(10):
                tokens = self.history(rng)
                given = list(tokens)
                guesses = list(drafter.propose_host(given, k))
                assert given == tokens, "propose_host must not change the tokens it is given"
                assert len(guesses) <= k, f"propose_host must return at most k = {k} drafts, got {len(guesses)}"
                known = all(isinstance(t, int) and 0 <= t < self.vocab for t in guesses)
                assert known, f"drafts must be int token ids below {self.vocab}, got {guesses}"

    # Inputs

    def test_only_known_tokens_are_read(self) -> None:
        """Stale drafts, other sequences and former contents of a slot must not influence drafts."""
        for histories in self.loads():
            first, *others = (self.guess(histories, poison=poison) for poison in (1, 2, 3))
            for other in others:
                _assert_same(first, other, "drafts depend on tokens past a row's length or in other slots")

    def test_the_host_bound_may_be_loose(self) -> None:
        for histories in self.loads():
            slack = self.max_len - max(map(len, histories.values()))
            _assert_same(self.guess(histories), self.guess(histories, slack=slack), "drafts depend on max_length")

    def test_a_row_depends_on_its_own_history_alone(self) -> None:
        """A seeded request must give the same text in any batch, order and slot."""
        for histories in self.loads():
            together = self.guess(histories)
            for (slot, history), guesses in zip(histories.items(), together, strict=True):
                _assert_same(self.guess({slot: history}), [guesses], "drafts of a row depend on the batch")
                other = (slot + 1) % self.slots
                _assert_same(self.guess({other: history}), [guesses], "drafts of a row depend on its slot")

    def test_a_slot_keeps_nothing_of_its_last_sequence(self) -> None:
        for histories in self.loads():
            used = self.asked()
            k = used.lookahead
            rng = random.Random(8)
            for length in (30, 12):
                before = {slot: [rng.randrange(self.vocab) for _ in range(length)] for slot in range(self.slots)}
                self.step(used, self.context(before, k, k))
            again = self.step(used, self.context(histories, k, k))
            _assert_same(self.guess(histories), again, "drafts depend on the previous sequence of the slot")

    def test_its_inputs_are_left_as_they_are(self) -> None:
        drafter = self.asked()
        for histories in self.loads():
            ctx = self.context(histories, drafter.lookahead, drafter.lookahead)
            before = [t.clone() for t in (ctx.slots_B, ctx.tokens_SL, ctx.lengths_B)]
            numbers = ctx.max_length, ctx.k
            self.step(drafter, ctx)
            same = all(map(torch.equal, before, (ctx.slots_B, ctx.tokens_SL, ctx.lengths_B)))
            assert same and (ctx.max_length, ctx.k) == numbers, "a drafter must not change its DraftContext"

    def test_equal_calls_give_equal_drafts(self) -> None:
        """Every rank must propose the same tokens, whatever the state of its process's random generators."""
        offered = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            random.seed(seed)
            drafter = self.asked()
            k = drafter.lookahead
            offered.append([self.step(drafter, self.context(histories, k, k)) for histories in self.loads()])
        for first, second in zip(*offered, strict=True):
            assert [g.tokens for g in first] == [g.tokens for g in second], "two ranks would propose different tokens"
            assert all(map(Guesses.same, first, second)), "two ranks would have different probabilities q"

    def test_propose_does_not_wait_for_the_device(self) -> None:
        drafter = self.on_device()
        for histories in self.loads():
            ctx = self.context(histories, drafter.lookahead, drafter.lookahead)
            with torch.inference_mode():
                self.observe(drafter, ctx)
                with NoHostSync("propose"):
                    drafter.propose(ctx)

    def test_observe_is_called_every_step(self) -> None:
        """observe must work with any number of tokens per row and without a propose between two calls."""
        drafter = self.bound()
        k = drafter.lookahead
        with torch.inference_mode():
            for chunk, histories in enumerate(self.loads(), start=1):
                ctx = self.context(histories, k, k)
                self.observe(drafter, ctx, chunk)
                self.observe(drafter, ctx, chunk)
        if k:
            histories = {2: [1, 2, 3, 1, 2], 0: [4]}
            again = self.step(drafter, self.context(histories, k, k))
            _assert_same(self.guess(histories), again, "drafts depend on earlier steps without drafts")

    # Verification

    def test_verified_drafts_leave_the_targets_distribution(self) -> None:
        """Chi-square test of verified tokens against the target's distribution, at each position reached.

        A drafter that returns probabilities must draw its drafts from them. Without any it may draft freely. All rows
        have one history and differ in their keys: over many histories, even fixed drafts look random.
        """
        rounds, rows = 6, 512
        drafter = self.asked(slots=rows)
        k = drafter.lookahead
        generator = torch.Generator().manual_seed(3)
        rng = random.Random(4)
        p_WV = (0.7 * torch.randn(k + 1, self.vocab, generator=generator)).softmax(-1)
        seen_WV = torch.zeros(k + 1, self.vocab)
        tried = {slot: self.history(rng) for slot in range(rows)}
        offered = self.step(drafter, self.context(tried, k, k, slots=rows))
        if any(g.tree for g in offered):
            pytest.skip("core.engine.verify supports only chains")
        assert any(g.tokens for g in offered), "no history led to a draft: override `history`"
        history = tried[max(tried, key=lambda slot: len(offered[slot].tokens))]
        for _ in range(rounds):
            keys = torch.randint(1 << 60, (rows,), generator=generator)
            ctx = self.context(dict.fromkeys(range(rows), history), k, k, slots=rows, keys=keys)
            guesses = self.step(drafter, ctx)
            verdict = _verify(p_WV, guesses, torch.randint(1 << 60, (rows,), generator=generator))
            for w in range(k + 1):
                reached = verdict.tokens_RW[verdict.accepted_R >= w, w]
                seen_WV[w] += torch.bincount(reached, minlength=self.vocab)
        for w, (seen_V, p_V) in enumerate(zip(seen_WV, p_WV, strict=True)):
            total = float(seen_V.sum())
            if total * float(p_V.min()) < 5:
                continue
            statistic = ((seen_V - total * p_V) ** 2 / (total * p_V)).sum()
            p_value = float(torch.special.gammaincc(torch.tensor((self.vocab - 1) / 2), statistic / 2))
            assert p_value > 1e-4, (
                f"verified tokens must follow the target's distribution, so drafts must be drawn from probs_BKV. "
                f"Position {w}: expected {p_V.tolist()}, got {(seen_V / total).tolist()}"
            )


def _rows(draft: Draft) -> list[Guesses]:
    counts = draft.count_B.tolist()
    probs_BKV, tree = draft.probs_BKV, draft.parents_BK is not None
    return [
        Guesses(tuple(tokens[:count]), None if probs_BKV is None else probs_BKV[row, :count].clone(), tree)
        for row, (tokens, count) in enumerate(zip(draft.tokens_BK.tolist(), counts, strict=True))
    ]


def _assert_int32(name: str, found: torch.Tensor, shape: tuple[int, ...]) -> None:
    kind = f"{found.dtype} {tuple(found.shape)}"
    assert kind == f"{torch.int32} {shape}", f"{name} must be {torch.int32} {shape}, got {kind}"


def _assert_same(expected: Seq[Guesses], found: Seq[Guesses], what: str) -> None:
    for row, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert a.same(b), f"{what}: row {row} has {a} in one call and {b} in another"


def _verify(p_WV: torch.Tensor, guesses: Seq[Guesses], key_R: torch.Tensor) -> VerifiedDrafts:
    """Verify as the engine does: rejection sampling against q if there is one, else a match with the target's draws."""
    rows, (width, vocab) = len(guesses), p_WV.shape
    draft_RK = torch.tensor([[*g.tokens, *[0] * (width - 1 - len(g.tokens))] for g in guesses])
    count_R = torch.tensor([len(g.tokens) for g in guesses])
    position_RW = torch.arange(width).expand(rows, width)
    if guesses[0].probs_KV is not None:
        q_RKV = torch.zeros(rows, width - 1, vocab)
        for row, g in enumerate(guesses):
            q_RKV[row, : len(g.tokens)] = g.probs_KV
        return verify_rejection(p_WV.expand(rows, width, vocab), q_RKV, draft_RK, count_R, key_R, position_RW)
    n = rows * width
    zeros = torch.zeros(n, dtype=torch.int64)
    params = SampleParams(
        torch.ones(n), zeros, torch.ones(n), torch.zeros(n), key_R.repeat_interleave(width), random=True, filtered=False
    )
    target = sample(p_WV.log().repeat(rows, 1), position_RW.reshape(-1), params)
    return verify_match(target.view(rows, width), draft_RK, count_R)


def verify_match(target_RW: torch.Tensor, draft_RK: torch.Tensor, count_R: torch.Tensor) -> VerifiedDrafts:
    """Verify with the engine's `accept` over a device state that holds only the drafts."""
    rows, width = target_RW.shape
    tokens_SL = torch.zeros(rows + 1, width, dtype=torch.int32)
    tokens_SL[:rows, : width - 1] = draft_RK
    computed_S = torch.zeros(rows + 1, dtype=torch.int64)
    drafts_S = torch.nn.functional.pad(count_R, (0, 1))
    slots_R, base_R = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    accepted = accept(target_RW, slots_R, base_R, count_R, tokens_SL, computed_S, drafts_S)
    return VerifiedDrafts(target_RW, accepted.accepted_R)
