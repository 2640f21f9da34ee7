"""Verification preserves the target's distribution; the same test rejects verifiers that do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy import stats

from dovetail.core.ops.random import Purpose, gumbel
from dovetail.core.testing.draft_verification import verify_match
from dovetail.core.worker.sampler import SampleParams, VerifiedDrafts, sample, verify_rejection, verify_typical

V, K, N = 6, 2, 20_000
Verify = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], VerifiedDrafts]


class Target:
    """A target whose distribution depends on the tokens before, so a wrongly accepted draft shows in the text."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._after = [(0.8 * torch.randn(*[V] * (1 + given))).softmax(-1) for given in range(3)]
        self.key = torch.randint(1 << 60, (N,))

    def after(self, *tokens: torch.Tensor) -> torch.Tensor:
        """Return the distribution of the token after the first 0, 1 or 2 tokens, [N, V]."""
        return self._after[len(tokens)][tokens] if tokens else self._after[0].expand(N, V)

    def p_value(self, tokens_RW: torch.Tensor, accepted_R: torch.Tensor) -> float:
        """Return the chi-square p-value of the first three tokens jointly against plain sampling, over N rows."""
        text: list[torch.Tensor] = []
        for w in range(3):
            # A row that stopped draws its next tokens plainly in later steps.
            noise = gumbel(self.key, torch.full((N,), 99 + w), Purpose.SAMPLE, V)
            plain = (self.after(*text).log() + noise).argmax(-1)
            text.append(torch.where(accepted_R >= w, tokens_RW[:, w], plain) if w < tokens_RW.shape[1] else plain)
        first, second, third = self._after
        expected = (N * first[:, None, None] * second[:, :, None] * third).flatten().double()
        observed = torch.bincount((text[0] * V + text[1]) * V + text[2], minlength=V**3).double()
        rare = expected < 5
        pooled = [torch.cat((each[~rare], each[rare].sum()[None])) for each in (observed, expected)]
        return float(stats.chisquare(pooled[0], pooled[1] * (N / pooled[1].sum())).pvalue)


def p_value(verify: Verify, *, certain: bool) -> float:
    target = Target()
    q_first, q_second = torch.randn(V).softmax(0), torch.randn(V, V).softmax(-1)
    if certain:
        draft = torch.tensor([1, 4]).expand(N, 2)
        q = torch.nn.functional.one_hot(draft, V).float()
    else:
        d1 = (q_first.log() + gumbel(target.key, torch.zeros(N), Purpose.DRAFT, V)).argmax(-1)
        d2 = (q_second[d1].log() + gumbel(target.key, torch.ones(N), Purpose.DRAFT, V)).argmax(-1)
        draft = torch.stack([d1, d2], 1)
        q = torch.stack([q_first.expand(N, V), q_second[d1]], 1)
    p = torch.stack([target.after(), target.after(draft[:, 0]), target.after(draft[:, 0], draft[:, 1])], 1)
    count = torch.randint(0, K + 1, (N,))  # Some rows have fewer drafts than positions.
    verified = verify(p, q, draft, count, target.key)
    return target.p_value(verified.tokens_RW, verified.accepted_R)


def positions(rows: int) -> torch.Tensor:
    return torch.arange(10, 10 + K + 1).expand(rows, K + 1)


def rejection(p, q, draft, count, key):  # type: ignore[no-untyped-def]
    return verify_rejection(p, q, draft, count, key, positions(len(key)))


def match(p, q, draft, count, key):  # type: ignore[no-untyped-def]
    rows = len(key) * (K + 1)
    params = SampleParams(
        torch.ones(rows),
        torch.zeros(rows, dtype=torch.long),
        torch.ones(rows),
        torch.zeros(rows),
        key.repeat_interleave(K + 1),
        True,
        False,
    )
    target = sample(p.reshape(rows, V).log(), positions(len(key)).reshape(-1), params).view(-1, K + 1)
    return verify_match(target, draft, count)


def always_accepts(p, q, draft, count, key):  # type: ignore[no-untyped-def]
    own = p[torch.arange(len(key)), count].log() + gumbel(key, count, Purpose.SAMPLE, V)
    tokens = torch.cat([draft, draft[:, :1]], 1).scatter(1, count[:, None], own.argmax(-1, keepdim=True))
    return VerifiedDrafts(tokens, count.clone())


def draws_from_p_after_rejection(p, q, draft, count, key):  # type: ignore[no-untyped-def]
    verified = rejection(p, q, draft, count, key)
    at = verified.accepted_R
    own = (p[torch.arange(len(key)), at].log() + gumbel(key, at + 10, Purpose.RESIDUAL, V)).argmax(-1)
    return VerifiedDrafts(verified.tokens_RW.scatter(1, at[:, None], own[:, None]), at)


def ignores_q(p, q, draft, count, key):  # type: ignore[no-untyped-def]
    return rejection(p, torch.full_like(q, 1 / V), draft, count, key)


@pytest.mark.parametrize(("verify", "certain"), [(rejection, False), (rejection, True), (match, True)])
def test_verification_is_lossless(verify: Verify, certain: bool) -> None:
    assert p_value(verify, certain=certain) > 0.01


@pytest.mark.parametrize(
    ("verify", "certain"),
    [
        (always_accepts, False),
        (always_accepts, True),
        (draws_from_p_after_rejection, False),
        (draws_from_p_after_rejection, True),
        (ignores_q, False),
    ],
)
def test_a_wrong_verifier_is_rejected(verify: Verify, certain: bool) -> None:
    assert p_value(verify, certain=certain) < 1e-6


def test_drafts_past_count_are_never_accepted() -> None:
    target = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 9, 7]])
    draft = torch.tensor([[5, 6], [5, 6], [5, 6], [5, 6]])
    accepted = verify_match(target, draft, torch.tensor([0, 1, 2, 2])).accepted_R
    assert accepted.tolist() == [0, 1, 2, 1]


def test_greedy_targets_make_rejection_exact() -> None:
    """With p a point mass, a draft is accepted exactly if it is the arg-max, as is the target's own token."""
    rows = 200
    best = torch.randint(V, (rows, K + 1))
    p = torch.nn.functional.one_hot(best, V).float()
    q = torch.rand(rows, K, V).softmax(-1)
    draft = torch.where(torch.rand(rows, K) < 0.6, best[:, :K], torch.randint(V, (rows, K)))
    count = torch.full((rows,), K)
    verified = rejection(p, q, draft, count, torch.randint(1 << 60, (rows,)))
    expected = (draft == best[:, :K]).long().cumprod(-1).sum(-1)
    assert torch.equal(verified.accepted_R, expected)
    assert torch.equal(verified.tokens_RW.gather(1, expected[:, None]), best.gather(1, expected[:, None]))


def typical(p, q, draft, count, key):  # type: ignore[no-untyped-def]
    own = p.log() + gumbel(key.repeat_interleave(K + 1), positions(len(key)).reshape(-1), Purpose.SAMPLE, V).view_as(p)
    return verify_typical(p, own.argmax(-1), draft, count)


def test_typical_acceptance_is_not_lossless() -> None:
    assert p_value(typical, certain=False) < 1e-6


def test_typical_acceptance_depends_on_the_entropy() -> None:
    """A sharp distribution accepts only its likely token, a flat one every token with 0.3 exp(-entropy)."""
    sharp, flat = torch.tensor([0.97, 0.02, 0.01]), torch.tensor([0.05, 0.04] + [0.91 / 40] * 40)
    for p_V, accepted in ((sharp, [1, 0, 0]), (flat, [1, 1, 1])):
        p_RWV, own_RW = p_V.expand(3, 2, -1), torch.full((3, 2), 2)
        verified = verify_typical(p_RWV, own_RW, torch.arange(3)[:, None], torch.ones(3, dtype=torch.long))
        assert verified.accepted_R.tolist() == accepted
        kept = [tokens[: n + 1] for tokens, n in zip(verified.tokens_RW.tolist(), accepted, strict=True)]
        assert kept == [[row, 2] if accepted[row] else [2] for row in range(3)]
