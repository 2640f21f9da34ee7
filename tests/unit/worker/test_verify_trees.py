"""Rejection on trees preserves the target's distribution; the same test rejects verifiers that do not.

Shapes as in dovetail.core.worker.sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from dovetail.core.ops.random import Purpose, gumbel
from dovetail.core.testing.draft_verification import walk
from dovetail.core.worker.sampler import verify_rejection_tree

from .test_verify import N, Target, V

PARENTS = [-1, -1, 0, 0, 1, -1, 2, 2]
RANKS = [0, 1, 0, 1, 0, 2, 0, 1]
"""Two levels below the first draft, three siblings at the root."""
DEPTH, K = 3, len(PARENTS)


@dataclass
class Step:
    """Arguments of `verify_rejection_tree`."""

    p: torch.Tensor
    q: torch.Tensor
    own: torch.Tensor
    draft: torch.Tensor
    parent: torch.Tensor
    drawn: torch.Tensor
    count: torch.Tensor
    key: torch.Tensor
    position: torch.Tensor

    def verify(self) -> torch.Tensor:
        return verify_rejection_tree(*vars(self).values())


Verify = Callable[[Step], torch.Tensor]


def draw_step(target: Target, *, filtered: bool = False) -> Step:
    """Draw trees without replacement from random distributions that depend on the last token. `filtered`: drafts have
    at most two tokens, so the third sibling is a copy."""
    q = [torch.randn(V).softmax(0), *(torch.randn(V, V).softmax(-1) for _ in range(2))]
    if filtered:
        q = [torch.where(one >= one.topk(2, -1).values[..., -1:], one, 0.0) for one in q]
        q = [one / one.sum(-1, keepdim=True) for one in q]
    levels, tokens, distributions = [0] * K, [], []
    for draft, (parent, rank) in enumerate(zip(PARENTS, RANKS, strict=True)):
        levels[draft] = 0 if parent < 0 else levels[parent] + 1
        level = levels[draft]
        own = q[0].expand(N, V) if parent < 0 else q[level][tokens[parent]]
        noise = gumbel(target.key, torch.full((N,), level), Purpose.DRAFT, V)
        found = (own.log() + noise).topk(3)
        alive = found.values[:, rank] > float("-inf")
        tokens.append(torch.where(alive, found.indices[:, rank], found.indices[:, 0]))
        distributions.append(own)
    draft = torch.stack(tokens, 1)
    texts = [[]]  # type: ignore[var-annotated]
    for node, parent in enumerate(PARENTS):
        texts.append([*texts[parent + 1], draft[:, node]])
    p = torch.stack([target.after(*text[:2]) for text in texts], 1)
    position = torch.tensor([0, *(level + 1 for level in levels)]).expand(N, 1 + K)
    noise = gumbel(target.key.repeat_interleave(1 + K), position.flatten(), Purpose.SAMPLE, V).view_as(p)
    count = torch.randint(0, K + 1, (N,))  # Some rows verify fewer drafts.
    shape = torch.tensor(PARENTS).expand(N, K), torch.arange(K).expand(N, K)
    return Step(
        p, torch.stack(distributions, 1), (p.log() + noise).argmax(-1), draft, *shape, count, target.key, position
    )


def p_value(verify: Verify, *, filtered: bool = False) -> float:
    target = Target()
    step = draw_step(target, filtered=filtered)
    verified = walk(verify(step), step.draft, step.parent, step.count, DEPTH)
    return target.p_value(verified.tokens_RW, verified.accepted_R)


def first_children(step: Step) -> torch.Tensor:
    """Accepts the first draft of each level."""
    drawn = step.own.clone()
    for node in range(-1, K):
        if node in PARENTS:
            drawn[:, node + 1] = step.draft[:, PARENTS.index(node)]
    return drawn


def ignores_q(step: Step) -> torch.Tensor:
    step.q = torch.full_like(step.q, 1 / V)
    return step.verify()


def draws_from_p_after_rejection(step: Step) -> torch.Tensor:
    drawn = step.verify()
    children = (step.parent[:, None] == torch.arange(-1, K)[:, None]) & (step.draft[:, None] == drawn[..., None])
    return torch.where(children.any(-1), drawn, step.own)


def takes_second_siblings_first(step: Step) -> torch.Tensor:
    order = torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])
    step.draft, step.q = step.draft[:, order], step.q[:, order]
    # The subtrees keep their parents' tokens.
    step.parent = torch.tensor([-1, -1, 1, 1, 0, -1, 2, 2]).expand(N, K)
    step.p = step.p[:, [0, *(order + 1).tolist()]]
    return step.verify()


@pytest.mark.parametrize("filtered", [False, True])
def test_rejection_on_trees_is_lossless(filtered: bool) -> None:
    assert p_value(Step.verify, filtered=filtered) > 0.01


@pytest.mark.parametrize(
    "verify", [first_children, ignores_q, draws_from_p_after_rejection, takes_second_siblings_first]
)
def test_a_wrong_verifier_is_rejected(verify: Verify) -> None:
    assert p_value(verify) < 1e-6


def test_greedy_targets_accept_the_path_of_their_arg_max() -> None:
    torch.manual_seed(1)
    target = Target()
    step = draw_step(target)
    best = step.p.argmax(-1)
    step.p, step.own = torch.nn.functional.one_hot(best, V).float(), best
    found, expected = (walk(draws, step.draft, step.parent, step.count, DEPTH) for draws in (step.verify(), best))
    assert torch.equal(found.accepted_R, expected.accepted_R)
    kept = torch.arange(1 + DEPTH) <= expected.accepted_R[:, None]
    assert torch.equal(found.tokens_RW[kept], expected.tokens_RW[kept])


def test_a_distribution_with_nan_draws_nothing() -> None:
    step = draw_step(Target())
    step.p[:, 0], step.own[:, 0] = float("nan"), -1
    assert (step.verify()[:, 0] == -1).all()
