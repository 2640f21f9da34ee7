"""Filters match a plain per-row computation, and draws follow the filtered distribution."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from dovetail.core.worker.sampler import SampleParams, probabilities, sample


def make(n: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SampleParams:
    return SampleParams(
        torch.full((n,), temperature),
        torch.full((n,), top_k),
        torch.full((n,), top_p),
        torch.full((n,), min_p),
        torch.randint(1 << 60, (n,)),
        random=temperature > 0,
        filtered=top_k > 0 or top_p < 1 or min_p > 0,
    )


def kept_by_hand(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    probs = (logits / temperature).softmax(0)
    order = probs.argsort(descending=True).tolist()
    if top_k:
        order = order[:top_k]
    total = sum(probs[i].item() for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass >= top_p and kept:
            break
        kept.append(i)
        mass += probs[i].item() / total
    best = probs[order[0]].item()
    return {i for i in kept if probs[i].item() >= min_p * best}


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 3},
        {"top_k": 1},
        {"top_p": 0.7},
        {"top_p": 0.01},
        {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.1, "temperature": 1.7},
        {"temperature": 0.3, "top_p": 0.95},
    ],
)
def test_filters_keep_what_they_should(options: dict[str, float]) -> None:
    logits = torch.randn(20, 11) * 2
    probs = probabilities(logits, make(20, **options))  # type: ignore[arg-type]
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    for row, got in zip(logits, probs, strict=True):
        kept = set(got.nonzero().flatten().tolist())
        assert kept == kept_by_hand(row, **full)  # type: ignore[arg-type]
        index = sorted(kept)
        assert torch.allclose(got[index], (row[index] / full["temperature"]).softmax(0))


def test_logits_equal_to_the_last_one_kept_stay() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    for options in ({"top_k": 2}, {"top_p": 0.7}):
        assert (probabilities(logits, make(1, **options)) > 0).tolist() == [[True, True, True, False]]  # type: ignore[arg-type]


def test_greedy_and_random_rows_share_a_batch() -> None:
    logits = torch.randn(40, 9)
    params = make(40)
    mixed = SampleParams(
        torch.where(torch.arange(40) % 2 == 0, 0.0, 1.0),
        params.top_k_N,
        params.top_p_N,
        params.min_p_N,
        params.key_N,
        True,
        False,
    )
    drawn = sample(logits, torch.arange(40), mixed)
    assert torch.equal(drawn[::2], logits.argmax(-1)[::2])
    assert torch.equal(drawn[1::2], sample(logits, torch.arange(40), params)[1::2])
    assert not torch.equal(drawn[1::2], logits.argmax(-1)[1::2])


def test_draws_follow_the_filtered_distribution() -> None:
    torch.manual_seed(0)
    n = 30_000
    logits = torch.randn(8).expand(n, 8)
    params = make(n, temperature=0.8, top_k=6, top_p=0.95)
    counts = torch.bincount(sample(logits, torch.arange(n), params), minlength=8).double()
    expected = probabilities(logits[:1], make(1, temperature=0.8, top_k=6, top_p=0.95))[0].double()
    inside = expected > 0
    assert counts[~inside].sum() == 0
    assert stats.chisquare(counts[inside], expected[inside] / expected.sum() * n).pvalue > 1e-3
