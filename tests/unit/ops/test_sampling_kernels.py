"""Kernels that draw tokens and compute log probabilities against their references in torch, compiled or interpreted
(see test_kernels.py)."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from dovetail.core.ops.choices import Choices, temporarily  # noqa: E402
from dovetail.core.ops.kernels.draw import best_triton, split_rows  # noqa: E402
from dovetail.core.ops.kernels.filters import draw_filtered_triton, least_kept_triton  # noqa: E402
from dovetail.core.ops.kernels.logprobs import best_logprobs_triton, logprobs_of_triton  # noqa: E402
from dovetail.core.ops.logprobs import best_logprobs_reference, logprobs_of_reference  # noqa: E402
from dovetail.core.ops.matmul import device_facts  # noqa: E402
from dovetail.core.ops.random import Purpose, gumbel  # noqa: E402
from dovetail.core.ops.sampling_programs import DRAW, FILTER, sampling_key  # noqa: E402
from dovetail.core.ops.step import (  # noqa: E402
    best_reference,
    least_kept_reference,
)
from dovetail.core.testing.interpreter import mend_interpreter  # noqa: E402

if INTERPRETED:
    mend_interpreter()

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FEWER = 4 if INTERPRETED else 1
"""Divisor of numbers of rows: the interpreter takes a second for each of them."""
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@pytest.mark.parametrize(
    ("rows", "vocab", "dtype"), [(1, 5, torch.float32), (2, 2049, torch.bfloat16), (1, 5000, torch.float32)]
)
def test_greedy_draw_takes_the_first_of_the_largest(rows, vocab, dtype):
    logits = torch.randn(rows, vocab, device=DEVICE).to(dtype)
    logits[:, vocab // 2] = logits[:, 1] = logits.max() + 1
    zero = torch.zeros(rows, device=DEVICE)
    _, got = best_triton(logits, zero.long(), zero, zero.long(), False)
    assert got.tolist() == [1] * rows


@pytest.mark.parametrize("random", [False, True])
def test_the_best_of_the_parts_is_the_best_of_all(random):
    rows, vocab, parts = 2, 2101, ((0, 700), (700, 2099), (2099, 2101))
    logits = torch.randn(rows, vocab, device=DEVICE).bfloat16()  # with ties
    key, position = torch.randint(1 << 62, (2, rows), device=DEVICE)
    given = position, torch.full((rows,), 0.7, device=DEVICE), key, random
    for function in (best_triton, best_reference):
        value, token = function(logits, *given)
        found = [function(logits[:, start:stop], *given, None, start) for start, stop in parts]
        values, tokens = (torch.stack(each) for each in zip(*found, strict=True))
        # The last bit of a logarithm may depend on the element's position in a SIMD vector.
        torch.testing.assert_close(values.amax(0), value, rtol=1e-6, atol=1e-6)
        best = torch.isclose(values, value, rtol=1e-6, atol=1e-6)
        assert torch.equal(torch.where(best, tokens, vocab).amin(0), token)


@pytest.mark.parametrize("draws", [best_triton, best_reference])
@pytest.mark.parametrize(("temperature", "filtered"), [(0.0, False), (0.7, False), (0.7, True)])
def test_rows_with_nan_or_infinity_draw_no_token(draws, temperature, filtered):
    nan, inf = float("nan"), float("inf")
    logits = torch.randn(5, 3000, device=DEVICE)
    logits[0], logits[1, 1234], logits[2, 5], logits[3, 1:] = nan, nan, inf, -inf
    full, none = torch.full((5,), temperature, device=DEVICE), torch.zeros(5, device=DEVICE)
    key, position = torch.randint(1 << 62, (2, 5), device=DEVICE)
    least = least_kept_triton(logits, full, none.int(), none + 0.9, none) if filtered else None
    value, got = draws(logits, position, full, key, temperature > 0, least)
    assert got[:4].tolist() == [-1, -1, -1, 0] and 0 <= got[4] < 3000 and value[:3].tolist() == [inf] * 3
    value, got = draws(logits[:, 1000:2000], position, full, key, temperature > 0, None, 1000)
    assert value[1] == inf and got[1] == -1 and 1000 <= got[2] < 2000


def test_random_draws_equal_the_reference():
    rows, vocab = 4, 3001
    logits = torch.randn(rows, vocab, device=DEVICE) * 2
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0], device=DEVICE)
    key = torch.randint(1 << 62, (rows,), device=DEVICE)
    position = torch.randint(1 << 20, (rows,), device=DEVICE)
    _, got = best_triton(logits, position, temperature, key, True)
    _, want = best_reference(logits, position, temperature, key, True)
    noise = gumbel(key, position, Purpose.SAMPLE, vocab)
    score = torch.where(temperature[:, None] > 0, logits / temperature.clamp_min(1e-9)[:, None] + noise, logits)
    # The two may differ if the best scores are equal up to the logarithm's rounding.
    gap = score.gather(1, want[:, None]) - score.gather(1, got[:, None])
    assert gap.abs().max() < 1e-4
    assert (got == want).sum() >= rows - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_least_logit_kept(dtype):
    """Each filter alone and all together, in batches with unfiltered rows. bf16 logits contain many ties."""
    rows, vocab = 8, 2203
    logits = (torch.randn(rows, vocab, device=DEVICE) * 3).to(dtype)
    logits[:, 7] = float("-inf")
    temperature = torch.tensor([1.0, 0.7, 1.3, 1.0, 0.0, 1.0, 2.0, 1.0], device=DEVICE)
    top_k = torch.tensor([40, 0, 0, 2100, 3, 0, 12, vocab * 2], device=DEVICE)
    top_p = torch.tensor([1.0, 0.9, 1.0, 0.5, 0.5, 1.0, 0.8, 0.999], device=DEVICE)
    min_p = torch.tensor([0.0, 0.0, 0.05, 0.0, 0.5, 0.0, 0.01, 0.0], device=DEVICE)
    got = least_kept_triton(logits, temperature, top_k, top_p, min_p)
    want = least_kept_reference(logits, temperature, top_k, top_p, min_p)
    # Another order of additions may move the top_p bound by one value. Equal logits are kept or dropped together.
    for row, (mine, reference) in enumerate(zip(got.tolist(), want.tolist(), strict=True)):
        values = logits[row].float().unique()
        kept = [int((values >= least).sum()) for least in (mine, reference)]
        assert abs(kept[0] - kept[1]) <= max(1, kept[1] * 1e-3), (row, kept)
    exact = top_p == 1
    assert torch.equal(got[exact & (min_p == 0)], want[exact & (min_p == 0)])
    assert torch.allclose(got[exact], want[exact], rtol=1e-6)


def shapes_of_logits(vocab):
    """Rows whose bounds are hard to find: peaked, flat, few distinct values, mostly masked, constant, extreme, NaN."""
    normal = torch.randn(vocab, device=DEVICE)
    peaked = normal.clone()
    peaked[vocab // 3] = 14.0
    two = torch.where(normal > 0.5, 1.5, 1.0)
    masked = torch.where(torch.arange(vocab, device=DEVICE) % 97 == 5, normal, float("-inf"))
    nans = torch.where(normal > 1, float("nan"), normal)
    extreme = normal * 1e4
    ramp = torch.linspace(0, 30, vocab, device=DEVICE)
    return torch.stack([normal * 0.3, normal * 4, peaked, two, masked, nans, extreme, ramp, torch.ones_like(normal)])


FILTERS = [(0.7, 0, 0.95), (1e-6, 0, 0.9999), (0.7, 20, 0.8), (1e-9, 1, 0.5)]
MORE_FILTERS = [(3.0, 0, 0.2), (1.0, 20, 1.0), (1.0, 9000, 1.0), (2.0, 9001, 0.9)]
"""The interpreter takes seconds for each."""


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), FILTERS if INTERPRETED else [*FILTERS, *MORE_FILTERS])
def test_the_least_logit_kept_of_any_distribution(temperature, top_k, top_p):
    """The kept logits hold top_p of the mass, and without the least of them they would not."""
    vocab = 10007
    logits = shapes_of_logits(vocab).to(torch.float32 if top_k % 2 else torch.bfloat16)
    rows = len(logits)
    given = [torch.full((rows,), x, device=DEVICE) for x in (temperature, top_k, top_p, 0.0)]
    got = least_kept_triton(logits, *given)
    if not INTERPRETED:  # The interpreter runs one program after another.
        assert torch.equal(got, least_kept_triton(logits, *given)), "the same logits have the same bound"
    ordered = logits.double().nan_to_num(nan=float("-inf"), neginf=float("-inf")).sort(-1, descending=True).values
    for row, least in zip(ordered, got.double(), strict=True):
        k = min(top_k or vocab, vocab)
        kept = row[row >= row[k - 1]]
        if top_p == 1.0:
            assert least == kept[-1]
            continue
        mass = ((kept - kept[0]) / temperature).softmax(-1)
        assert least in row, "the bound is one of the logits"
        assert mass[kept >= least].sum() >= top_p - 1e-5
        assert mass[kept > least].sum() <= top_p + 1e-5


def expected_draws(logits, position, key, temperature, top_k, top_p, min_p):
    """Return the draws of the reference, and whether another order of additions can change each of them."""
    least = least_kept_reference(logits, temperature, top_k, top_p, min_p)
    values, near = logits.float().unique(), []
    for shift in (-1, 1):
        at = (torch.searchsorted(values, least) + shift).clamp(0, len(values) - 1)
        near.append(torch.where(top_p < 1, values[at], least))
    draws = [best_reference(logits, position, temperature, key, True, bound)[1] for bound in (least, *near)]
    return draws[0], (draws[0] != draws[1]) | (draws[0] != draws[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_filtered_draws_equal_the_reference(dtype):
    """Rows whose first try is kept, rows that try several, rows that try in vain or not at all."""
    torch.seed()
    rows, vocab = 32 // FEWER, 2500
    logits = (torch.randn(rows, vocab, device=DEVICE) * torch.linspace(0.3, 6, rows, device=DEVICE)[:, None]).to(dtype)
    pick = torch.arange(rows, device=DEVICE) % 8
    temperature = torch.tensor([0.8, 1.0, 0.7, 1.5, 0.0, 1.0, 1.0, 0.9], device=DEVICE)[pick]
    top_k = torch.tensor([0, 0, 0, 0, 0, 20, 0, 0], device=DEVICE)[pick]
    top_p = torch.tensor([0.95, 0.5, 0.7, 0.3, 0.9, 0.8, 1.0, 0.9], device=DEVICE)[pick]
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.2], device=DEVICE)[pick]
    key, position = torch.randint(1 << 62, (2, rows), device=DEVICE)
    given = temperature, top_k, top_p, min_p
    got = draw_filtered_triton(logits, position, key, *given)
    want, open_to_rounding = expected_draws(logits, position, key, *given)
    assert open_to_rounding.sum() < rows // 2
    noisy = logits / temperature.clamp_min(1e-9)[:, None] + gumbel(key, position, Purpose.SAMPLE, vocab)
    gap = (noisy.gather(1, want[:, None]) - noisy.gather(1, got[:, None])).squeeze(1).abs()
    assert torch.all((got == want) | open_to_rounding | (gap < 1e-4)), (got, want)


@pytest.mark.parametrize("top_p", [0.5, 0.95])
def test_tries_are_those_of_the_best_noisy_logits(top_p):
    """The mass of many rows is in few tokens of one part, so that some of the best are not listed."""
    torch.seed()
    rows, vocab = 40 // FEWER, 2048
    logits = torch.full((rows, vocab), -30.0, device=DEVICE)
    logits[:, torch.arange(12, device=DEVICE) * 1024 % vocab + torch.arange(12, device=DEVICE) // 2] = torch.linspace(
        1.0, 2.0, 12, device=DEVICE
    )
    one, zero = torch.ones(rows, device=DEVICE), torch.zeros(rows, device=DEVICE)
    key, position = torch.randint(1 << 62, (2, rows), device=DEVICE)
    given = one, zero.long(), zero + top_p, zero
    got = draw_filtered_triton(logits, position, key, *given)
    want, open_to_rounding = expected_draws(logits, position, key, *given)
    assert torch.all((got == want) | open_to_rounding) and (got == want).sum() > rows // 2
    assert len(want.unique()) > 1


def test_filtered_draws_of_rows_with_nan_or_infinity():
    nan, inf = float("nan"), float("inf")
    logits = torch.randn(5, 3000 // FEWER, device=DEVICE)
    logits[0], logits[1, 700], logits[2, 5], logits[3, 1:] = nan, nan, inf, -inf
    full, none = torch.full((5,), 0.9, device=DEVICE), torch.zeros(5, device=DEVICE)
    key, position = torch.randint(1 << 62, (2, 5), device=DEVICE)
    got = draw_filtered_triton(logits, position, key, full, none.long(), full, none)
    assert got[:4].tolist() == [-1, -1, -1, 0] and 0 <= got[4] < 3000 // FEWER


def test_a_filtered_draw_is_one_of_those_kept():
    rows, vocab = 3, 700
    logits = torch.randn(rows, vocab, device=DEVICE)
    one, zero = torch.ones(rows, device=DEVICE), torch.zeros(rows, device=DEVICE)
    least = least_kept_triton(logits, one, (zero + 3).long(), one, zero)
    best = logits.topk(3, dim=-1).indices
    for position in range(2):
        at = torch.full((rows,), position, device=DEVICE)
        _, got = best_triton(logits, at, one, torch.arange(rows, device=DEVICE) * 7919, True, least)
        assert (best == got[:, None]).any(1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "vocab", "count"), [(3, 5, 5), (2, 4097, 1), (4, 9000, 20), (1, 4096, 64)])
def test_best_logprobs(rows, vocab, count, dtype):
    torch.seed()
    logits_NV = (3 * torch.randn(rows, vocab, device=DEVICE)).to(dtype)
    logits_NV[0, ::2] = float("-inf")
    got, want = best_logprobs_triton(logits_NV, count), best_logprobs_reference(logits_NV, count)
    torch.testing.assert_close(got.total_N, want.total_N, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.values_Nn, want.values_Nn, rtol=1e-5, atol=1e-5)
    assert all(len(set(ids)) == count for ids in got.ids_Nn.tolist())
    found = logits_NV.gather(1, got.ids_Nn).float() - got.total_N[:, None]
    torch.testing.assert_close(found, got.values_Nn, rtol=1e-5, atol=1e-5)


def test_rows_have_the_log_probabilities_that_they_want():
    rows, vocab, count = 5, 9000, 7
    logits_NV = torch.randn(rows, vocab, device=DEVICE)
    wanted = [3, -1, 0, 7, 60]
    got = best_logprobs_triton(logits_NV, count, torch.tensor(wanted, device=DEVICE))
    want = best_logprobs_reference(logits_NV, count)
    for row, number in enumerate(wanted):
        if number >= 0:
            torch.testing.assert_close(got.total_N[row], want.total_N[row])
            torch.testing.assert_close(got.values_Nn[row, :number], want.values_Nn[row, :number])
            assert torch.equal(got.ids_Nn[row, :number], want.ids_Nn[row, :number])
    tokens_N = torch.tensor([5, 0, -1, vocab - 1, 8], device=DEVICE)
    given = logits_NV, tokens_N, want.total_N
    torch.testing.assert_close(logprobs_of_triton(*given), logprobs_of_reference(*given))


def test_best_logprobs_of_equal_logits_and_of_none():
    got = best_logprobs_triton(torch.zeros(2, 5000, device=DEVICE), 3)
    assert got.ids_Nn.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(got.values_Nn, torch.full((2, 3), 1 / 5000, device=DEVICE).log())
    assert best_logprobs_triton(torch.zeros(0, 9, device=DEVICE), 2).values_Nn.shape == (0, 2)


@pytest.mark.parametrize("op", [DRAW, FILTER])
def test_tokens_do_not_depend_on_the_number_of_programs(op):
    """In a tuning table it is a choice, and the same logits give the same tokens with each."""
    logits = torch.randn(3, 5000, device=DEVICE) * 3
    position, key = (torch.randint(1, 1 << 20, (3,), device=DEVICE) for _ in range(2))
    filters = [torch.tensor(column, device=DEVICE) for column in ([0.8] * 3, [0, 20, 0], [0.9, 0.8, 1.0], [0.0] * 3)]
    given = (logits, position, filters[0], key, True)
    least = least_kept_reference(logits, *filters) if op == FILTER else None
    expected = best_reference(*given, least)[1]
    gpu = "" if INTERPRETED else device_facts(logits.device)[0]
    for programs in (3, 6, 9):
        with temporarily(Choices({(op, gpu, sampling_key(5000, "float32")): {4: {"programs": programs}}})):
            got = draw_filtered_triton(logits, position, key, *filters) if op == FILTER else best_triton(*given)[1]
            assert split_rows(op, logits, 3) == programs // 3, "the choice has no effect"
        assert torch.equal(got, expected), programs
