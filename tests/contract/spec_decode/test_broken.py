"""Drafters with one fault each; the suite must reject them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from dovetail.core.interfaces import AcceptedPath, Draft, DraftContext, Drafter, FedTokens, Hidden, KVGroup, TargetView
from dovetail.core.testing.spec_decode import DrafterContract
from dovetail.core.testing.suite import failures
from dovetail.core.worker.features import FeatureStore

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
        tokens_BK = (last_B[:, None] + 1 + torch.arange(ctx.k)) % self.target.build.spec.vocab
        return Draft(tokens_BK, ((last_B + ctx.lengths_B) % (ctx.k + 1)).int())


class Drawer(Follower):
    """Correct: draws near the last token."""

    verify = "rejection"

    def propose(self, ctx: DraftContext) -> Draft:
        tokens_BK = torch.stack([self.drawn(ctx, self.logits(ctx), w) for w in range(ctx.k)], 1)
        return Draft(tokens_BK, torch.full_like(ctx.slots_B, ctx.k))

    def logits(self, ctx: DraftContext) -> torch.Tensor:
        return -((torch.arange(self.target.build.spec.vocab) - self.last(ctx)[:, None]).abs() * 0.4)

    def drawn(self, ctx: DraftContext, logits_BV: torch.Tensor, w: int) -> torch.Tensor:
        return ctx.draw(logits_BV, w)


class HostFollower(Drafter):
    """Correct, on the host."""

    needs_host_tokens = True

    @property
    def lookahead(self) -> int:
        return 3

    def propose(self, ctx: DraftContext) -> Draft:
        raise AssertionError("its drafts come from the host")

    def propose_host(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        return [(tokens[-1] + 1 + i) % self.target.build.spec.vocab for i in range(min(k, len(tokens)))]


fault = partial(variant, Follower)
drawer = partial(variant, Drawer)
on_host = partial(variant, HostFollower)


def changed(name: str, change: Any) -> type[Follower]:
    """Follower that returns another draft."""
    return fault(name, propose=lambda self, ctx: change(ctx, Follower.propose(self, ctx)))


def writes_the_table(ctx: DraftContext, draft: Draft) -> Draft:
    place_BK = ctx.lengths_B[:, None].long() + torch.arange(ctx.k)
    ctx.tokens_SL[ctx.slots_B[:, None], place_BK] = draft.tokens_BK.int()
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
        self.first_S = torch.full((target.max_seqs + 1,), -1, dtype=torch.int64)

    def last(self, ctx: DraftContext) -> torch.Tensor:
        known_B = self.first_S[ctx.slots_B]
        last_B = torch.where(known_B < 0, super().last(ctx), known_B)
        self.first_S[ctx.slots_B] = last_B
        return last_B


class WantsToBeAskedFirst(Follower):
    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.waiting = False

    def observe(self, fed: FedTokens, hidden: Hidden) -> None:
        assert not self.waiting, "observed twice"
        self.waiting = True

    def propose(self, ctx: DraftContext) -> Draft:
        self.waiting = False
        return super().propose(ctx)


class LearnsItsLookahead(Follower):
    def bind(self, target: TargetView) -> None:
        super().bind(target)
        self.ahead = 5


class StopsEarly(Follower):
    @property
    def draft_counts(self) -> tuple[int, ...]:
        return (1, self.lookahead - 1)


class ReturnsTheLikeliest(Drawer):
    """Draws, and returns the mode instead."""

    def drawn(self, ctx: DraftContext, logits_BV: torch.Tensor, w: int) -> torch.Tensor:
        ctx.draw(logits_BV, w)
        return logits_BV.argmax(-1)


class DrawsTwice(Drawer):
    """Returns the first draw of a position; the second one, from other logits, is what verification knows."""

    def drawn(self, ctx: DraftContext, logits_BV: torch.Tensor, w: int) -> torch.Tensor:
        token_B = ctx.draw(logits_BV, w)
        ctx.draw(3 * logits_BV, w)
        return token_B


class SumsTokens(Drafter):
    """Correct: keeps a sum by slot of the tokens that cannot be taken back."""

    def __init__(self, config: object) -> None:
        super().__init__(config)

    @property
    def lookahead(self) -> int:
        return 2

    def bind(self, target: TargetView) -> None:
        super().bind(target)
        self.sum_S, self.summed_S = torch.zeros(2, target.max_seqs + 1, dtype=torch.int64)

    def join(self, slots_J: torch.Tensor, computed_J: torch.Tensor) -> None:
        self.sum_S[slots_J] = self.summed_S[slots_J] = 0

    def observe(self, fed: FedTokens, hidden: Hidden) -> None:
        taken_T = torch.arange(len(fed.ids_T)) >= fed.row_start_B1[self.first(fed)]
        self.sum_S.index_add_(0, fed.slots_T, torch.where(taken_T, fed.ids_T, 0).long())
        self.summed_S.index_add_(0, fed.slots_T, taken_T.long())

    def first(self, fed: FedTokens) -> int:
        return fed.decodes

    def propose(self, ctx: DraftContext) -> Draft:
        place_L = torch.arange(ctx.tokens_SL.shape[1])
        new_BL = (place_L >= self.summed_S[ctx.slots_B, None]) & (place_L < ctx.lengths_B[:, None])
        sum_B = self.sum_S[ctx.slots_B] + torch.where(new_BL, ctx.tokens_SL[ctx.slots_B], 0).sum(1)
        return Draft((sum_B % 8)[:, None].repeat(1, ctx.k), torch.full_like(ctx.slots_B, ctx.k))


class ContinuesTheFeature(Follower):
    """Correct: drafts what the target's head makes of the feature of the last token but one."""

    width = 1 + Follower.ahead

    def bind(self, target: TargetView) -> None:
        super().bind(target)
        self.features = FeatureStore(target, self.width, target.build.spec.hidden)

    def observe(self, fed: FedTokens, hidden: Hidden) -> None:
        self.features.keep(fed, hidden.states)

    def last(self, ctx: DraftContext) -> torch.Tensor:
        return self.target.logits(self.features.at(ctx.slots_B, ctx.lengths_B - 2)).argmax(-1).int()


class TreeOfFeatures(ContinuesTheFeature):
    """Correct: a tree in which the longest path is not the first one."""

    ahead, depth, width = 5, 3, 6  # type: ignore[assignment]
    parents = (-1, -1, 0, 1, 3)

    def propose(self, ctx: DraftContext) -> Draft:
        last_B, vocab = self.last(ctx), self.target.build.spec.vocab
        tokens_BK = (last_B[:, None] * 3 + torch.arange(1, self.lookahead + 1)) % vocab
        parents_BK = torch.tensor(self.parents).expand_as(tokens_BK)
        return Draft(tokens_BK[:, : ctx.k], torch.full_like(ctx.slots_B, ctx.k), parents_BK[:, : ctx.k])

    def keep(self, path: AcceptedPath) -> None:
        self.features.move(path)


class DrawsTrees(Drawer):
    """Correct: draws siblings near the last token."""

    ahead, depth = 5, 2  # type: ignore[assignment]
    parents, ranks, drawn = (-1, -1, 0, 0, 1), (0, 1, 0, 1, 0), (0, 0, 1, 1, 2)

    def propose(self, ctx: DraftContext) -> Draft:
        return self.kept(self.tokens(ctx)[:, : ctx.k])

    def tokens(self, ctx: DraftContext) -> torch.Tensor:
        first_Bn, _ = ctx.best(self.logits(ctx), 0, 2)
        logits_MV = -((torch.arange(8) - first_Bn.flatten()[:, None]).abs() * 0.4)
        later_BNn = ctx.best(logits_MV, 1, 2)[0].view(len(first_Bn), 2, 2)
        siblings = [first_Bn, first_Bn, *[later_BNn[:, 0]] * 2, later_BNn[:, 1]]
        return torch.stack([each[:, rank] for each, rank in zip(siblings, self.ranks, strict=True)], 1)

    def kept(self, tokens_BK: torch.Tensor) -> Draft:
        parents_BK, drawn_BK = (torch.tensor(each).expand(len(tokens_BK), -1) for each in (self.parents, self.drawn))
        count, count_B = tokens_BK.shape[1], torch.full_like(tokens_BK[:, 0], tokens_BK.shape[1])
        return Draft(tokens_BK, count_B, parents_BK[:, :count], drawn_BK[:, :count])


class KeepsHighIds(DrawsTrees):
    """Which drafts exist depends on their ids."""

    def kept(self, tokens_BK: torch.Tensor) -> Draft:
        return replace(super().kept(tokens_BK), count_B=torch.where(tokens_BK[:, 0] > 2, tokens_BK.shape[1], 0))


sums = partial(variant, SumsTokens)
tree = partial(variant, TreeOfFeatures)


class CountsChunks(SumsTokens):
    """Its drafts depend on how a prompt was cut."""

    def observe(self, fed: FedTokens, hidden: Hidden) -> None:
        super().observe(fed, hidden)
        self.sum_S[fed.slots_B[fed.decodes :]] += 1


class WaitsForTokens(SumsTokens):
    def observe(self, fed: FedTokens, hidden: Hidden) -> None:
        if fed.ids_T.numel() and fed.ids_T.min() >= 0:
            super().observe(fed, hidden)


class HasTheTargetsPages(Follower):
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return (KVGroup(0, (0,)),)


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
    "test_a_row_may_want_fewer_drafts": [
        fault("DraftsWhatIsWanted", last=lambda self, ctx: Follower.last(self, ctx) + ctx.k_B)
    ],
    "test_trees_are_as_deep_as_stated": [
        tree("DeeperThanStated", depth=2),
        tree("ChildrenFirst", parents=(-1, 2, -1, 1, 3)),
        tree("DepthOfNone", depth=0),
    ],
    "test_chunks_of_a_prompt_change_no_draft": [CountsChunks],
    "test_rejected_drafts_leave_nothing_behind": [
        sums("BelievesItsDrafts", first=lambda self, fed: 0),
        variant(ContinuesTheFeature, "ContinuesTheLastDraft", width=1),
    ],
    "test_accepted_drafts_count_as_known_tokens": [
        tree("LeavesFeaturesWhereTheyAre", keep=lambda self, path: None),
        sums(
            "KnowsThePrompt", propose=lambda self, ctx: Draft(self.sum_S[ctx.slots_B, None] % 8, ctx.k_B.clamp_max(1))
        ),
    ],
    "test_files_are_checked_before_it_is_bound": [
        fault("BindsToCheck", check_files=lambda self, target: self.bind(target))
    ],
    "test_its_kv_groups_follow_the_target_s": [HasTheTargetsPages],
    "test_a_row_depends_on_its_own_history_alone": [
        fault("TakesTheFirstRowForAll", last=lambda self, ctx: Follower.last(self, ctx)[:1].expand(len(ctx.slots_B))),
        fault("LooksAtTheSlot", last=lambda self, ctx: Follower.last(self, ctx) + ctx.slots_B.int()),
    ],
    "test_shapes_dtypes_and_counts": [
        changed("RealTokens", lambda ctx, draft: Draft(draft.tokens_BK.float(), draft.count_B)),
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
    "test_observe_does_not_wait_for_the_device": [WaitsForTokens],
    "test_a_slot_keeps_nothing_of_its_last_sequence": [RemembersTheSlot],
    "test_observe_is_called_every_step": [WantsToBeAskedFirst],
    "test_lookahead_is_one_number_from_the_start": [LearnsItsLookahead],
    "test_the_last_of_its_counts_is_all_drafts": [StopsEarly],
    "test_verified_drafts_leave_the_targets_distribution": [
        ReturnsTheLikeliest,
        DrawsTwice,
        drawer("DrawsNothing", drawn=lambda self, ctx, logits_BV, w: logits_BV.argmax(-1)),
        KeepsHighIds,
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


SOUND = [
    *(Follower, Drawer, SumsTokens, ContinuesTheFeature, TreeOfFeatures, HostFollower),
    pytest.param(DrawsTrees, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("sound", SOUND)
def test_the_unbroken_ones_pass(sound: type[Drafter]) -> None:
    assert failures(suite_of(sound)) == {}
