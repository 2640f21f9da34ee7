"""Drafters with one fault each; the suite must reject them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from dovetail.core.interfaces import Draft, DraftContext, Drafter, TargetView
from dovetail.core.ops.random import Purpose, gumbel
from dovetail.core.testing.spec_decode import DrafterContract
from dovetail.core.testing.suite import failures

from ..faults import each, rejects, suite, variant


class Follower(Drafter):
    """Correct: counts up from the last token, sometimes with fewer than k tokens."""

    ahead = 3

    @property
    def lookahead(self) -> int:
        return self.ahead

    def last(self, ctx: DraftContext) -> torch.Tensor:
        return ctx.tokens_SL[ctx.slots_B, ctx.lengths_B.long() - 1]

    def propose(self, ctx: DraftContext) -> Draft:
        last_B = self.last(ctx)
        tokens_BK = (last_B[:, None] + 1 + torch.arange(ctx.k, dtype=torch.int32)) % self.target.spec.vocab
        return Draft(tokens_BK, ((last_B + ctx.lengths_B) % (ctx.k + 1)).int())


class Drawer(Follower):
    """Correct: draws from a q that depends on the last token, with noise from the row's key and length."""

    def propose(self, ctx: DraftContext) -> Draft:
        q_BKV = self.q(ctx)
        rows, k, vocab = q_BKV.shape
        at_BK = ctx.lengths_B.long()[:, None] + torch.arange(k)
        noise = gumbel(ctx.key_S[ctx.slots_B].repeat_interleave(k), at_BK.flatten(), Purpose.DRAFT, vocab)
        tokens_BK = (q_BKV.log() + noise.view(rows, k, vocab)).argmax(-1).int()
        return Draft(tokens_BK, torch.full((rows,), k, dtype=torch.int32), self.stated(q_BKV))

    def q(self, ctx: DraftContext) -> torch.Tensor:
        vocab = self.target.spec.vocab
        place_V = torch.arange(vocab)
        scores_BV = -((place_V - self.last(ctx)[:, None]).abs() * 0.4)
        return scores_BV.softmax(-1)[:, None].repeat(1, ctx.k, 1)

    def stated(self, q_BKV: torch.Tensor) -> torch.Tensor:
        return q_BKV


class HostFollower(Drafter):
    """Correct, on the host."""

    needs_host_tokens = True

    @property
    def lookahead(self) -> int:
        return 3

    def propose(self, ctx: DraftContext) -> Draft:
        raise AssertionError("its drafts come from the host")

    def propose_host(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        return [(tokens[-1] + 1 + i) % self.target.spec.vocab for i in range(min(k, len(tokens)))]


fault = partial(variant, Follower)
drawer = partial(variant, Drawer)
on_host = partial(variant, HostFollower)


def changed(name: str, change: Any) -> type[Follower]:
    """Follower that returns another draft."""
    return fault(name, propose=lambda self, ctx: change(ctx, Follower.propose(self, ctx)))


def writes_the_table(ctx: DraftContext, draft: Draft) -> Draft:
    place_BK = ctx.lengths_B[:, None].long() + torch.arange(ctx.k)
    ctx.tokens_SL[ctx.slots_B[:, None], place_BK] = draft.tokens_BK
    return draft


class WaitsForTheDevice(Follower):
    def propose(self, ctx: DraftContext) -> Draft:
        if ctx.lengths_B.max() > 0:
            return super().propose(ctx)
        raise AssertionError


class RemembersTheSlot(Follower):
    """Keeps its first proposal for a slot."""

    def bind(self, target: TargetView) -> None:
        super().bind(target)
        self.first_S = torch.full((target.max_seqs + 1,), -1, dtype=torch.int32)

    def last(self, ctx: DraftContext) -> torch.Tensor:
        known_B = self.first_S[ctx.slots_B]
        last_B = torch.where(known_B < 0, super().last(ctx), known_B)
        self.first_S[ctx.slots_B] = last_B
        return last_B


class WantsToBeAskedFirst(Follower):
    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.waiting = False

    def observe(self, ctx: DraftContext, hidden_TC: torch.Tensor, taps: Mapping[int, torch.Tensor]) -> None:
        assert not self.waiting, "observed twice"
        self.waiting = True

    def propose(self, ctx: DraftContext) -> Draft:
        self.waiting = False
        return super().propose(ctx)


class LearnsItsLookahead(Follower):
    def bind(self, target: TargetView) -> None:
        super().bind(target)
        self.ahead = 5


class DeniesItsGuess(Drawer):
    def propose(self, ctx: DraftContext) -> Draft:
        draft = super().propose(ctx)
        q_BKV = draft.probs_BKV.scatter(-1, draft.tokens_BK[..., None].long(), 0.0)
        return Draft(draft.tokens_BK, draft.count_B, q_BKV / q_BKV.sum(-1, keepdim=True))


class SaysTheLikeliest(Drawer):
    """States q but returns its mode instead of a draw."""

    def propose(self, ctx: DraftContext) -> Draft:
        draft = super().propose(ctx)
        return Draft(draft.probs_BKV.argmax(-1).int(), draft.count_B, draft.probs_BKV)


def uniform(ctx: DraftContext, draft: Draft) -> Draft:
    rows, k = draft.tokens_BK.shape
    return replace(draft, count_B=torch.full_like(draft.count_B, k), probs_BKV=torch.full((rows, k, 8), 1 / 8))


class HostEatsTokens(HostFollower):
    def propose_host(self, tokens: Any, k: int) -> Sequence[int]:
        found = super().propose_host(tokens, k)
        tokens.append(zlib.crc32(b"") % 8)
        return found


BROKEN: dict[str, list[type[Drafter]]] = {
    "test_only_known_tokens_are_read": [
        fault("ReadsAhead", last=lambda self, ctx: ctx.tokens_SL[ctx.slots_B, ctx.lengths_B.long()]),
        fault("ReadsTheNeighbour", last=lambda self, ctx: ctx.tokens_SL[(ctx.slots_B + 1) % len(ctx.tokens_SL), 0]),
    ],
    "test_the_host_bound_may_be_loose": [
        fault("ReadsTheBound", last=lambda self, ctx: Follower.last(self, ctx) + int(ctx.max_length > 39))
    ],
    "test_a_row_depends_on_its_own_history_alone": [
        fault("TakesTheFirstRowForAll", last=lambda self, ctx: Follower.last(self, ctx)[:1].expand(len(ctx.slots_B))),
        fault("LooksAtTheSlot", last=lambda self, ctx: Follower.last(self, ctx) + ctx.slots_B.int()),
    ],
    "test_shapes_dtypes_and_counts": [
        changed("WideTokens", lambda ctx, draft: Draft(draft.tokens_BK.long(), draft.count_B)),
        changed("CountsTooFar", lambda ctx, draft: Draft(draft.tokens_BK, draft.count_B + 1)),
        fault("IgnoresK", propose=lambda self, ctx: Follower.propose(self, replace(ctx, k=self.lookahead))),
        changed("LeavesTheVocabulary", lambda ctx, draft: Draft(draft.tokens_BK + 1, draft.count_B)),
    ],
    "test_equal_calls_give_equal_drafts": [
        fault("RollsDice", last=lambda self, ctx: torch.randint(8, ctx.slots_B.shape, dtype=torch.int32)),
        on_host(
            "HostRollsDice",
            propose_host=lambda self, tokens, k: HostFollower.propose_host(self, [int(torch.randint(8, ()))], k),
        ),
    ],
    "test_its_inputs_are_left_as_they_are": [changed("WritesTheTable", writes_the_table)],
    "test_propose_does_not_wait_for_the_device": [WaitsForTheDevice],
    "test_a_slot_keeps_nothing_of_its_last_sequence": [RemembersTheSlot],
    "test_observe_is_called_every_step": [WantsToBeAskedFirst],
    "test_lookahead_is_one_number_from_the_start": [LearnsItsLookahead],
    "test_probabilities_are_a_distribution_that_holds_the_guess": [
        drawer("Unnormalised", stated=lambda self, q_BKV: q_BKV * 1.5),
        DeniesItsGuess,
    ],
    "test_verified_drafts_leave_the_targets_distribution": [
        # States a sharper q than it drew from.
        drawer("Boasts", stated=lambda self, q_BKV: (3 * q_BKV.log()).softmax(-1)),
        SaysTheLikeliest,
        changed("StatesUniformForFixedDrafts", uniform),
    ],
    "test_host_guesses_are_at_most_k_tokens": [
        on_host(
            "HostGuessesTooMany",
            propose_host=lambda self, tokens, k: HostFollower.propose_host(self, [*tokens, tokens[-1]], k + 1),
        ),
        HostEatsTokens,
    ],
}


def suite_of(drafter: type[Drafter]) -> DrafterContract:
    return suite(DrafterContract, make=lambda self: drafter(None))


@each(BROKEN)
def test_the_suite_rejects(broken: type[Drafter], test: str) -> None:
    assert rejects(suite_of(broken), test)


@pytest.mark.parametrize("sound", [Follower, Drawer, HostFollower])
def test_the_unbroken_ones_pass(sound: type[Drafter]) -> None:
    assert failures(suite_of(sound)) == {}
