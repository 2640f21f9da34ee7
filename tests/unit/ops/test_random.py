"""Counter-based random numbers: a pure function of their arguments, with the right distribution."""

from __future__ import annotations

import torch
from scipy import stats

from dovetail.core.interfaces import Request, SamplingParams
from dovetail.core.ops.random import Purpose, gumbel, sequence_key, uniform


def keys(n: int) -> torch.Tensor:
    return torch.tensor([sequence_key(0, Request(i, (1,), SamplingParams()), 0) for i in range(n)])


def test_a_draw_depends_on_its_own_row_alone() -> None:
    key, position = keys(5), torch.arange(5)
    together = uniform(key, position, Purpose.SAMPLE, 40)
    for i in range(5):
        alone = uniform(key[i : i + 1], position[i : i + 1], Purpose.SAMPLE, 40)
        assert torch.equal(alone[0], together[i])


def test_uniform_over_columns_positions_and_keys() -> None:
    one = torch.tensor([sequence_key(3, Request(0, (1,), SamplingParams()), 0)])
    over_columns = uniform(one, torch.tensor([7]), Purpose.SAMPLE, 20_000)[0]
    over_positions = uniform(one.expand(20_000), torch.arange(20_000), Purpose.SAMPLE, 1)[:, 0]
    over_keys = uniform(keys(5_000), torch.full((5_000,), 7), Purpose.ACCEPT, 1)[:, 0]
    for draws in (over_columns, over_positions, over_keys):
        assert 0 < draws.min() and draws.max() < 1
        assert stats.kstest(draws.numpy(), "uniform").pvalue > 1e-3


def test_purposes_and_positions_are_uncorrelated() -> None:
    key, n = keys(1).expand(4000), torch.arange(4000)
    sample, accept = (uniform(key, n, p, 1)[:, 0] for p in (Purpose.SAMPLE, Purpose.ACCEPT))
    assert abs(stats.pearsonr(sample, accept).statistic) < 0.06
    assert abs(stats.pearsonr(sample[1:], sample[:-1]).statistic) < 0.06


def test_gumbel_maximum_draws_from_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    n = 20_000
    noise = gumbel(keys(1).expand(n), torch.arange(n), Purpose.SAMPLE, 5)
    counts = torch.bincount((logits + noise).argmax(-1), minlength=5)
    assert stats.chisquare(counts, logits.softmax(0).double() / logits.softmax(0).double().sum() * n).pvalue > 1e-3


def test_the_key_follows_the_seed_where_there_is_one() -> None:
    seeded = SamplingParams(seed=4)
    assert sequence_key(0, Request(1, (1,), seeded), 0) == sequence_key(9, Request(2, (1,), seeded), 0)
    assert sequence_key(0, Request(1, (1,), seeded), 0) != sequence_key(0, Request(1, (1,), seeded), 1)
    plain = SamplingParams()
    assert sequence_key(0, Request(1, (1,), plain), 0) != sequence_key(0, Request(2, (1,), plain), 0)
    assert sequence_key(0, Request(1, (1,), plain), 0) != sequence_key(1, Request(1, (1,), plain), 0)
