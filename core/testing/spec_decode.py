"""Contract suite for drafters. Subclass DrafterContract in a test module and override `make`.

Shapes: B rows, S slots, L tokens, K drafts, V vocabulary, W = 1 + K.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
import torch

from dovetail.core.interfaces import CatchUp, Drafter, ModelSource, ModelSpec, TargetView
from dovetail.core.testing.draft_bench import Bench, Guesses, Histories
from dovetail.core.testing.draft_target import FIRST_GROUP, target_with_mtp
from dovetail.core.testing.draft_verification import verify_by_rejection
from dovetail.core.testing.host_sync import NoHostSync
from dovetail.core.testing.model_driver import build_context

HIDDEN = 8


class DrafterContract:
    """Tests of the rules of dovetail.core.interfaces.Drafter, over a small target. Only `make` must be overridden."""

    vocab = 8
    """Vocabulary size of the target; small, so that counting can distinguish distributions."""
    mtp = False
    """Whether the target has a layer for multi-token prediction (`TargetView.mtp_layer`). It is then a small DeepSeek
    V3 with random weights."""
    slots = 6
    max_len = 40

    def make(self) -> Drafter:
        """Return a fresh, unbound drafter. Every call must return an equal one."""
        raise NotImplementedError("return your drafter: MyDrafter(MyConfig(...))")

    def target(self, slots: int) -> TargetView:
        """Return the argument of `bind`. Override for a drafter that needs another target."""
        if self.mtp:
            return target_with_mtp(self.vocab, slots, self.max_len)
        generator = torch.Generator().manual_seed(1)
        table_VC = torch.randn(self.vocab, HIDDEN, generator=generator)
        spec = ModelSpec("small", self.vocab, 2, HIDDEN, 2, 2, HIDDEN // 2, HIDDEN, self.max_len, "float32")
        return TargetView(
            build=build_context(spec, max_len=2 * self.max_len),
            source=ModelSource(None, dummy=True),
            max_seqs=slots,
            max_len=self.max_len,
            first_group=FIRST_GROUP,
            embed=lambda tokens_T: table_VC[tokens_T.long()],
            logits=lambda states_BC: states_BC.float() @ table_VC.T,
        )

    # Drivers

    def bench(self, slots: int | None = None) -> Bench:
        """Return a fresh drafter on a bench."""
        drafter, view = self.make(), self.target(slots or self.slots)
        drafter.bind(view)
        return Bench(drafter, view)

    def asked(self, slots: int | None = None) -> Bench:
        """Return a fresh drafter that proposes drafts (lookahead > 0)."""
        if self.make().lookahead == 0:
            pytest.skip("lookahead = 0: no drafts")
        return self.bench(slots)

    def on_device(self) -> Bench:
        bench = self.asked()
        if bench.drafter.needs_host_tokens:
            pytest.skip("needs_host_tokens = True: drafts come from the host")
        return bench

    def guess(self, histories: Histories, k: int | None = None, *, poison: int = 0, chunk: int = 0) -> list[Guesses]:
        """Return the drafts of a fresh drafter."""
        bench = self.asked()
        bench.seat(histories, poison=poison, chunk=chunk)
        return bench.guess(k)

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
        bench = self.bench()
        assert bench.lookahead == lookahead, "`bind` changed lookahead, but the engine has already sized its tables"
        if lookahead:
            bench.seat({0: [1, 2, 1]})
            bench.guess()
            assert bench.drafter.lookahead == lookahead, "a step changed lookahead"
        assert self.make().lookahead == lookahead, "two equal drafters must have the same lookahead"

    def test_the_last_of_its_counts_is_all_drafts(self) -> None:
        drafter = self.make()
        counts, lookahead = drafter.draft_counts, drafter.lookahead
        expected = not counts if not lookahead else counts[0] > 0 and counts[-1] == lookahead
        ascending = all(a < b for a, b in zip(counts, counts[1:], strict=False))
        assert expected and ascending, f"draft_counts must ascend to lookahead = {lookahead}, got {counts}"
        whole = counts == (lookahead,) or drafter.depth == lookahead
        assert whole, f"a tree is not cut off: draft_counts must be ({lookahead},), got {counts}"

    def test_files_are_checked_before_it_is_bound(self) -> None:
        drafter, view = self.make(), self.target(self.slots)
        drafter.check_files(replace(view, build=replace(view.build, device=torch.device("meta"))))
        assert "target" not in vars(drafter), "check_files must not call `bind`: the target has no weights yet"

    def test_its_kv_groups_follow_the_target_s(self) -> None:
        ids = [group.id for group in self.bench().groups]
        expected = list(range(FIRST_GROUP, FIRST_GROUP + len(ids)))
        assert ids == expected, f"KV group ids must count from target.first_group: {expected}, got {ids}"

    # Drafts

    def test_shapes_dtypes_and_counts(self) -> None:
        bench = self.on_device()
        for k in range(1, bench.lookahead + 1):
            for histories in self.loads():
                bench.seat(histories)
                bench.guess(k)
                draft, rows = bench.watched.draft, len(histories)
                _assert_integers("tokens_BK", draft.tokens_BK, (rows, k))
                _assert_integers("count_B", draft.count_B, (rows,))
                in_range = 0 <= int(draft.count_B.min()) and int(draft.count_B.max()) <= k
                assert in_range, f"count_B must be within 0 to k = {k}, got {draft.count_B.tolist()}"
                for tokens, count in zip(draft.tokens_BK.tolist(), draft.count_B.tolist(), strict=True):
                    known = all(0 <= t < self.vocab for t in tokens[:count])
                    assert known, f"drafts must be token ids below {self.vocab}, got {tokens[:count]}"

    def test_trees_are_as_deep_as_stated(self) -> None:
        """A step counts on `depth`: it bounds the length of a row."""
        bench = self.on_device()
        depth, lookahead = bench.drafter.depth, bench.lookahead
        assert 0 < depth <= lookahead, f"depth must be within 1 to lookahead = {lookahead}, got {depth}"
        for histories in self.loads():
            bench.seat(histories)
            if depth == lookahead:
                bench.guess()
                assert bench.watched.draft.parents_BK is None, "depth = lookahead: no tree, so no parents_BK"
                continue
            guessed, draft = bench.guess(), bench.watched.draft
            _assert_integers("parents_BK", draft.parents_BK, (len(histories), lookahead))
            for found, count in zip(guessed, draft.count_B.tolist(), strict=True):
                kept = len(found.tokens)
                words = f"a parent must precede its draft (-1 = the row's last token), at most depth = {depth} levels"
                assert kept == count, f"{words}: {kept} of {count} drafts of {draft.parents_BK.tolist()} do so"

    def test_a_row_may_want_fewer_drafts(self) -> None:
        """The number of drafts that each row verifies changes no draft of any row."""
        bench, rng = self.on_device(), random.Random(7)
        for histories in self.loads():
            bench.seat(histories)
            full = bench.guess()
            bench.seat(histories)
            most = [rng.randrange(bench.lookahead + 1) for _ in histories]
            for all_drafts, some, limit in zip(full, bench.guess(most=most), most, strict=True):
                expected = all_drafts.tokens[:limit]
                assert some.tokens == expected, f"a row that verifies {limit} drafts has {some}, and else {all_drafts}"

    def test_host_guesses_are_at_most_k_tokens(self) -> None:
        drafter = self.asked().drafter
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

    def test_chunks_of_a_prompt_change_no_draft(self) -> None:
        for histories in self.loads():
            whole = self.guess(histories)
            for chunk in (1, 5):
                _assert_same(whole, self.guess(histories, chunk=chunk), f"drafts depend on chunks of {chunk} tokens")

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
            used, rng = self.asked(), random.Random(8)
            for length in (30, 12):
                used.seat({slot: [rng.randrange(self.vocab) for _ in range(length)] for slot in range(self.slots)})
                used.guess()
            used.seat(histories)
            _assert_same(self.guess(histories), used.guess(), "drafts depend on the previous sequence of the slot")

    def test_pages_of_a_shared_prefix_serve_as_its_own(self) -> None:
        """A sequence that takes over pages of another one has the drafts that it has alone."""
        bench, rng = self.asked(), random.Random(9)
        if not bench.groups:
            pytest.skip("kv_groups = (): no pages of its own")
        prefix = [rng.randrange(self.vocab) for _ in range(2 * bench.page)]
        histories = {1: [*prefix, 1, 2], 0: [*prefix, 3, 1, 1, 4]}
        bench.seat(histories, shared=2)
        _assert_same(self.guess(histories), bench.guess(), "drafts depend on who computed the prefix")

    def test_its_inputs_are_left_as_they_are(self) -> None:
        bench = self.on_device()
        for histories in self.loads():
            bench.seat(histories)
            bench.guess()
            assert not bench.watched.changed, "a drafter must not change its DraftContext"

    def test_equal_calls_give_equal_drafts(self) -> None:
        """Every rank must propose the same tokens, whatever the state of its process's random generators."""
        offered = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            random.seed(seed)
            bench, found = self.asked(), []
            for histories in self.loads():
                bench.seat(histories)
                found.append(bench.guess())
            offered.append(found)
        for first, second in zip(*offered, strict=True):
            assert [g.tokens for g in first] == [g.tokens for g in second], "two ranks would propose different tokens"
            assert all(map(Guesses.same, first, second)), "two ranks would have different probabilities q"

    def test_propose_does_not_wait_for_the_device(self) -> None:
        bench = self.on_device()
        for histories in self.loads():
            bench.seat(histories)
            bench.watched.guard = NoHostSync("propose")
            bench.guess()

    def test_observe_does_not_wait_for_the_device(self) -> None:
        bench = self.bench()
        for chunk, histories in enumerate(self.loads(), start=1):
            bench.seat(histories, chunk=chunk)
            for drafts in (True, False):
                bench.verify({}, drafts=drafts)
                if bench.lookahead:
                    with torch.inference_mode(), NoHostSync("observe"):
                        bench.drafter.observe(*bench.watched.observed)

    # Steps

    def test_rejected_drafts_leave_nothing_behind(self) -> None:
        """After steps that accepted no draft, with one without drafts between, drafts are those of a fresh sequence."""
        for histories in self.loads():
            longer = {slot: history for slot, history in histories.items() if len(history) > 3}
            if not longer:
                continue
            bench = self.asked()
            bench.seat({slot: history[:-3] for slot, history in longer.items()})
            bench.guess()
            bench.verify({slot: [history[-3]] for slot, history in longer.items()}, beside=(1, 2, 3))
            bench.verify({slot: [history[-2]] for slot, history in longer.items()}, drafts=False)
            bench.guess()
            bench.verify({slot: [history[-1]] for slot, history in longer.items()})
            _assert_same(self.guess(longer), bench.guess(), "drafts depend on rejected drafts")

    def test_accepted_drafts_count_as_known_tokens(self) -> None:
        """After steps that accepted every draft, drafts are those of a sequence that had these tokens before."""
        bench, rng = self.asked(), random.Random(11)
        histories = {slot: self.history(rng)[: self.max_len // 2] for slot in range(self.slots)}
        bench.seat(histories)
        for _ in range(2):
            accepted = {
                slot: [*(guesses.tokens[draft] for draft in guesses.longest), rng.randrange(self.vocab)]
                for slot, guesses in zip(histories, bench.guess(), strict=True)
            }
            bench.verify(accepted)
            histories = {slot: [*history, *accepted[slot]] for slot, history in histories.items()}
            if max(map(len, histories.values())) >= self.max_len - bench.lookahead:
                break
        _assert_same(self.guess(histories), bench.guess(), "drafts depend on which tokens were drafts")

    def test_rows_further_behind_than_its_window_have_no_drafts(self) -> None:
        """After so many steps without drafts a row catches up, if the drafter resumes, or has no more drafts."""
        bench, rng = self.asked(), random.Random(12)
        if (window := bench.drafter.window) is None:
            pytest.skip("window = None: drafts do not depend on earlier proposals")
        behind = window + 1
        histories = {slot: [rng.randrange(self.vocab) for _ in range(behind + 4)] for slot in range(2)}
        bench.seat({slot: history[:-behind] for slot, history in histories.items()})
        for at in range(-behind, 0):
            bench.verify({slot: [history[at]] for slot, history in histories.items()}, drafts=False)
        assert not any(guesses.tokens for guesses in bench.guess()), f"it drafts for rows {behind} tokens behind"
        found = bench.guess()
        if bench.drafter.resumes:
            _assert_same(self.guess(histories), found, "drafts depend on earlier steps without drafts")
        else:
            assert not any(guesses.tokens for guesses in found), "resumes = False: rows left behind have no more drafts"

    @pytest.mark.parametrize("shared", [0, 2])
    def test_a_prompt_that_it_does_not_follow_leaves_rows_behind(self, shared: int) -> None:
        """The drafter feeds none of its tokens, so they are missing in its pages, also for a sequence that shares them
        as a prefix. If the drafter resumes, rows catch up; otherwise they have no drafts."""
        bench, rng = self.asked(), random.Random(13)
        if (window := bench.drafter.window) is None:
            pytest.skip("window = None: drafts do not depend on earlier proposals")
        prefix = [rng.randrange(self.vocab) for _ in range(2 * bench.page)]
        histories = {1: [*prefix, 1, 2], 0: [*prefix, 3, 1, 1, 4]}
        bench.seat(histories, shared=shared, follow=False)
        for _ in range(2 * bench.page // window):
            assert not any(guesses.tokens for guesses in bench.guess()), "it drafts for rows that it did not follow"
        for _ in range(-(-6 // window)):
            found = bench.guess()
        if bench.drafter.resumes:
            _assert_same(self.guess(histories), found, "drafts depend on who followed the prompt")
        else:
            assert not any(guesses.tokens for guesses in found), "resumes = False: rows left behind have no more drafts"

    @pytest.mark.parametrize("shared", [0, 2])
    def test_rows_catch_up_by_chunks(self, shared: int) -> None:
        """Chunks of rows that it did not follow, which begin and end anywhere, with tokens that it has fed already or
        that do not exist yet, give the drafts of a fresh sequence."""
        bench, rng = self.asked(), random.Random(14)
        if not bench.drafter.catches_up:
            pytest.skip("catches_up = False: no chunks")
        prefix = [rng.randrange(self.vocab) for _ in range(2 * bench.page)]
        later = min(bench.lookahead, bench.drafter.window or 1)
        ends = ([rng.randrange(self.vocab) for _ in range(1 + later)] for _ in range(2))
        histories = {slot: prefix + end for slot, end in zip((1, 0), ends, strict=True)}
        bench.seat({slot: history[:-later] for slot, history in histories.items()}, shared=shared, follow=False)
        bench.catch_up([CatchUp(0, 0, 2)])
        bench.catch_up([CatchUp(1, 0, len(prefix)), CatchUp(0, 1, 2)])
        found = bench.guess()[1].tokens
        assert not found or len(prefix) - 2 <= bench.drafter.window, "it drafts for a row before it has caught up"
        bench.catch_up([CatchUp(0, 3, len(histories[0]) - 3)])
        for at in range(-later, 0):
            bench.verify({slot: [history[at]] for slot, history in histories.items()}, drafts=False)
        _assert_same(self.guess(histories), bench.guess(), "drafts depend on who followed the prompt")

    def test_observe_is_called_every_step(self) -> None:
        """observe must work with any number of tokens per row and without a propose between two calls."""
        bench = self.bench()
        for chunk, histories in enumerate(self.loads(), start=1):
            bench.seat(histories, chunk=chunk)
            bench.verify({}, drafts=False)
            bench.verify({})
        if bench.lookahead:
            histories = {1: [1, 2, 3, 1, 2], 0: [4]}
            bench.seat(histories)
            _assert_same(self.guess(histories), bench.guess(), "drafts depend on earlier steps without drafts")

    # Verification

    def test_verified_drafts_leave_the_targets_distribution(self) -> None:
        """Chi-square test of tokens verified by rejection against the target's distribution, at each position reached.

        The drafts must be draws of `DraftContext.draw`, those of trees of `DraftContext.best`. Otherwise drafts are
        compared with the target's own draws, and no drafter can change the distribution. All rows have one history and
        differ in their keys: over many histories, even fixed drafts look random.
        """
        rounds, rows = 6, 512
        if self.make().verify != "rejection":
            pytest.skip("the distribution depends on drafts only if `verify` is rejection")
        bench = self.asked(slots=rows)
        depth = bench.drafter.depth
        generator = torch.Generator().manual_seed(3)
        rng = random.Random(4)
        p_WV = (0.7 * torch.randn(depth + 1, self.vocab, generator=generator)).softmax(-1)
        seen_WV = torch.zeros(depth + 1, self.vocab)
        tried = {slot: self.history(rng) for slot in range(rows)}
        bench.seat(tried)
        offered = bench.guess()
        assert any(g.tokens for g in offered), "no history led to a draft: override `history`"
        history = tried[max(tried, key=lambda slot: len(offered[slot].tokens))]
        for _ in range(rounds):
            bench.seat(dict.fromkeys(range(rows), history), keys=torch.randint(1 << 60, (rows,), generator=generator))
            verdict = verify_by_rejection(p_WV, bench.guess(), torch.randint(1 << 60, (rows,), generator=generator))
            for w in range(depth + 1):
                reached = verdict.tokens_RW[verdict.accepted_R >= w, w]
                seen_WV[w] += torch.bincount(reached, minlength=self.vocab)
        for w, (seen_V, p_V) in enumerate(zip(seen_WV, p_WV, strict=True)):
            total = float(seen_V.sum())
            if total * float(p_V.min()) < 5:
                continue
            statistic = ((seen_V - total * p_V) ** 2 / (total * p_V)).sum()
            p_value = float(torch.special.gammaincc(torch.tensor((self.vocab - 1) / 2), statistic / 2))
            assert p_value > 1e-4, (
                f"tokens verified by rejection must follow the target's distribution, so drafts must come from "
                f"DraftContext.draw, in trees from DraftContext.best. Position {w}: expected {p_V.tolist()}, got "
                f"{(seen_V / total).tolist()}"
            )


def _assert_integers(name: str, found: torch.Tensor, shape: tuple[int, ...]) -> None:
    right = found.dtype in (torch.int32, torch.int64) and tuple(found.shape) == shape
    assert right, f"{name} must be int32 or int64 {shape}, got {found.dtype} {tuple(found.shape)}"


def _assert_same(expected: Seq[Guesses], found: Seq[Guesses], what: str) -> None:
    for row, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert a.same(b), f"{what}: row {row} has {a} in one call and {b} in another"
