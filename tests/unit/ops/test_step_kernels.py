"""A step's bookkeeping kernels against their torch references, compiled or interpreted (see test_kernels.py)."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from dovetail.core.interfaces import LogitsContext, Request, SamplingParams  # noqa: E402
from dovetail.core.ops.kernels.draw import best_triton, gather_params_triton  # noqa: E402
from dovetail.core.ops.kernels.filters import draw_filtered_triton, least_kept_triton  # noqa: E402
from dovetail.core.ops.kernels.logprobs import best_logprobs_triton, logprobs_of_triton  # noqa: E402
from dovetail.core.ops.kernels.step import (  # noqa: E402
    accept_triton,
    gather_samples_triton,
    lay_out_pages_triton,
    lay_out_tokens_triton,
    write_drafts_triton,
)
from dovetail.core.ops.logprobs import best_logprobs_reference, logprobs_of_reference  # noqa: E402
from dovetail.core.ops.random import Purpose, gumbel  # noqa: E402
from dovetail.core.ops.samples import SampleInputs, gather_samples_reference  # noqa: E402
from dovetail.core.ops.step import (  # noqa: E402
    accept_reference,
    best_reference,
    lay_out_pages_reference,
    lay_out_tokens_reference,
    least_kept_reference,
    write_drafts_reference,
)
from dovetail.core.testing.interpreter import mend_interpreter  # noqa: E402
from dovetail.core.testing.numeric import poisoned_memory  # noqa: E402
from dovetail.plugins.logits import kernels as logits_kernels  # noqa: E402
from dovetail.plugins.logits.config import PenaltiesConfig  # noqa: E402
from dovetail.plugins.logits.kernels import PROGRAMS, add_pairs_triton, penalise_triton  # noqa: E402
from dovetail.plugins.logits.penalties import Penalties  # noqa: E402
from dovetail.plugins.logits.ragged import SparseRows  # noqa: E402
from dovetail.plugins.spec_decode import kernels as lookup_kernels  # noqa: E402
from dovetail.plugins.spec_decode.corpus import Corpus  # noqa: E402
from dovetail.plugins.spec_decode.lookup import look_up_reference  # noqa: E402

if INTERPRETED:
    mend_interpreter()

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FEWER = 4 if INTERPRETED else 1
"""Divisor of numbers of rows: the interpreter takes a second for each of them."""
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@pytest.mark.parametrize("padding", [0, 37, 300])
@pytest.mark.parametrize("counts", [(1,), (1, 1, 3, 300), (2, 0, 2), (0, 0)])
def test_layout(counts, padding):
    slots, capacity, page = 6, 700, 16
    tokens_SL = torch.randint(1000, (slots, capacity), dtype=torch.int32, device=DEVICE)
    computed_S = torch.randint(capacity - 310, (slots,), device=DEVICE)
    # Large page tables are copied in parts.
    pages = -(-capacity // page) if padding else 1500
    table_SP = torch.randint(99, (slots, pages), dtype=torch.int32, device=DEVICE)
    slots_B = torch.randperm(slots, device=DEVICE)[: len(counts)]
    row_start = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32, device=DEVICE)
    total, longest = sum(counts) + padding, max(*counts, 1)
    drafted = (torch.randint(3, (slots,), device=DEVICE), len(counts) - 1) if padding else (None, 0)
    with poisoned_memory():
        got = lay_out_tokens_triton(slots_B, row_start, computed_S, tokens_SL, total, longest, *drafted)
    want = lay_out_tokens_reference(slots_B, row_start, computed_S, tokens_SL, total, *drafted)
    assert got.index_T is want.index_T is got.tree is want.tree is None, "no row feeds a tree"
    for name in ("ids_T", "positions_T", "rows_T", "slots_T", "live_T", "kv_len_B"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert (want.slots_T[sum(counts) :] == slots - 1).all() and not want.positions_T[sum(counts) :].any()
    lengths = [
        0 if slot == slots - 1 else count if drafted[0] is None or row >= drafted[1] else int(drafted[0][slot]) + 1
        for row, (slot, count) in enumerate(zip(slots_B.tolist(), counts, strict=True))
    ]
    live = [place < length for count, length in zip(counts, lengths, strict=True) for place in range(count)]
    assert want.live_T.tolist() == live + [False] * padding
    given_S = computed_S + torch.arange(slots, device=DEVICE) % 3
    got_pages = lay_out_pages_triton(slots_B, want, table_SP, given_S, page)
    want_pages = lay_out_pages_reference(slots_B, want, table_SP, given_S, page)
    assert (want_pages.write_T[want.positions_T < given_S[want.slots_T]] < page).all()
    assert torch.equal(got_pages.page_table_BP, want_pages.page_table_BP)
    assert torch.equal(got_pages.write_T, want_pages.write_T)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("channels", [24, 4100])
def test_gathered_samples(width, channels):
    """Some first tokens are past the step's tokens, as can happen for unused rows of a CUDA graph."""
    tokens, rows = 21, 5
    states = torch.randn(tokens, channels, device=DEVICE)
    positions = torch.randint(99, (tokens,), device=DEVICE)
    samples = torch.stack([torch.randint(n, (rows,), device=DEVICE) for n in (tokens + 9, 30, width)], 1)
    samples[0] = torch.tensor([4, 2, width - 1])
    got, want = (SampleInputs.empty(rows, width, channels, states.dtype, DEVICE) for _ in range(2))
    gather_samples_triton(states, positions, samples, got)
    gather_samples_reference(states, positions, samples, want)
    assert got.token_RW is want.token_RW is None, "all rows have as many positions"
    for name in set(want.__slots__) - {"token_RW"}:
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert torch.equal(want.states_NC[:width], states[4 : 4 + width])
    assert want.position_N[:width].tolist() == (positions[4 : 4 + width] + 1).tolist()


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


def test_parameters_of_slots():
    columns = [torch.randn(9, device=DEVICE) for _ in range(3)] + [torch.randint(99, (2, 9), device=DEVICE)[0]] * 2
    slots = torch.randint(9, (200,), device=DEVICE)
    assert all(map(torch.equal, gather_params_triton(slots, *columns), [column[slots] for column in columns]))


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


@pytest.mark.parametrize("width", [1, 2, 5])
def test_accept(width):
    slots, capacity, rows = 9, 40, 7
    tokens_SL = torch.randint(3, (slots, capacity), dtype=torch.int32, device=DEVICE)
    computed_S = torch.randint(capacity, (slots,), device=DEVICE)
    drafts_S = torch.randint(width, (slots,), device=DEVICE)
    slots_R = torch.randperm(slots - 1, device=DEVICE)[:rows]
    slots_R[-2:] = slots - 1  # Padding, twice.
    base_R = torch.randint(capacity - width, (rows,), device=DEVICE)
    limit_R = torch.randint(width, (rows, 3), device=DEVICE)[:, 1]
    drawn_RW = torch.randint(-1, 3, (rows, width), device=DEVICE)
    states = [[t.clone() for t in (tokens_SL, computed_S, drafts_S)] for _ in range(2)]
    got = accept_triton(drawn_RW, slots_R, base_R, limit_R, *states[0])
    want = accept_reference(drawn_RW, slots_R, base_R, limit_R, *states[1])
    assert torch.equal(got.accepted_R, want.accepted_R)
    assert torch.equal(got.lengths_R, want.lengths_R)
    assert torch.equal(got.drafted_R, want.drafted_R)
    for mine, theirs, name in zip(*states, ("tokens", "computed", "drafts"), strict=True):
        assert torch.equal(mine[:-1], theirs[:-1]), name
    assert torch.equal(states[0][1][-1], computed_S[-1]), "padding was computed"


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


def test_penalties_visit_each_token_of_the_history_once(monkeypatch):
    torch.seed()
    monkeypatch.setattr(logits_kernels, "PROGRAMS", 32)  # Each processes several rows.
    rows, slots, vocab, length = 70, 5, 300, 1200
    processor = Penalties(PenaltiesConfig())
    processor.allocate(slots, vocab, DEVICE)
    for slot, params in enumerate(
        (
            SamplingParams(),
            SamplingParams(repetition_penalty=1.3),
            SamplingParams(presence_penalty=0.7),
            SamplingParams(frequency_penalty=-0.4),
            SamplingParams(repetition_penalty=0.8, presence_penalty=-1.0, frequency_penalty=0.3),
        )
    ):
        processor.join(slot, Request(uid=slot, prompt_ids=(1,), params=params))
    ctx = LogitsContext(
        slots_N=torch.randint(slots, (rows,), device=DEVICE),
        lengths_N=torch.randint(1, length + 1, (rows,), device=DEVICE),
        tokens_SL=torch.randint(vocab // 2, (slots, length + 100), device=DEVICE).int(),
        prompt_len_S=torch.randint(1, 40, (slots,), device=DEVICE),
        max_length=length,
    )
    for dtype in (torch.float32, torch.bfloat16):
        logits_NV = (3 * torch.randn(rows, vocab, device=DEVICE)).to(dtype)
        counts = torch.zeros(PROGRAMS, vocab, dtype=torch.int32, device=DEVICE)
        got = logits_NV.clone()
        penalties = processor.repetition_S, processor.presence_S, processor.frequency_S
        penalise_triton(got, ctx, *penalties, counts)
        want = processor.apply_reference(logits_NV.float(), ctx)
        torch.testing.assert_close(got.float(), want, rtol=1e-5 if dtype.itemsize > 2 else 1e-2, atol=1e-5)
        assert not counts.any() and torch.equal(got[ctx.slots_N == 0], logits_NV[ctx.slots_N == 0])


def test_pairs_are_added_until_the_history_is_long_enough():
    vocab, slots = 500, 4
    pairs = SparseRows(slots, 300, DEVICE)
    pairs.set(1, {token: token / 7 for token in range(3, 250)})
    pairs.set(2, {5: float("-inf"), 9: 1.0}, until=20)
    slots_N = torch.tensor([3, 2, 1, 2, 0], device=DEVICE)
    lengths_N = torch.tensor([5, 19, 400, 20, 1], device=DEVICE)
    ctx = LogitsContext(slots_N, lengths_N, slots_N[None], slots_N, 400)
    logits_NV = torch.randn(5, vocab, device=DEVICE)
    logits_NV[:, 0] = -0.0
    got = logits_NV.clone()
    add_pairs_triton(got, ctx, pairs.ids_SM, pairs.values_SM, pairs.counts_S, pairs.until_S)
    want = pairs.add_reference(logits_NV.clone(), ctx)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    changed = [not torch.equal(row, before) for row, before in zip(got, logits_NV, strict=True)]
    assert changed == [False, True, True, False, False]


@pytest.mark.parametrize(("k", "matches"), [(4, (2, 4, 4.0)), (3, (1, 1, 3.0)), (5, (1, 20, 1.5))])
def test_prompt_lookup(k, matches, monkeypatch):
    """Matches lie in the same block as the end, in an earlier one, or across two; some rows have none."""
    monkeypatch.setattr(lookup_kernels, "BLOCK", 16)
    slots, capacity, rows = 9, 70, 6
    tokens_SL = torch.randint(5, (slots, capacity), dtype=torch.int32, device=DEVICE)
    tokens_SL[0] = torch.arange(capacity)
    slots_B = torch.tensor([0, 3, 5, 8, 1, 2], device=DEVICE)
    lengths_B = torch.tensor([60, 1, 17, 33, 61, 2], device=DEVICE)
    tokens_SL[1, 57:61] = tokens_SL[1, 14:18]
    plain = None
    for corpus in (None, random_corpus(slots, lead=matches[1])):
        got = lookup_kernels.look_up_triton(slots_B, lengths_B, tokens_SL, k, *matches, corpus)
        want = look_up_reference(slots_B, lengths_B, tokens_SL, k, *matches, corpus)
        assert torch.equal(got[1], want[1]) and 0 < int((want[1] > 0).sum()) < rows + (corpus is not None)
        for mine, theirs, count in zip(got[0], want[0], want[1], strict=True):
            assert torch.equal(mine[:count], theirs[:count])
        assert plain is None or not torch.equal(plain[1], want[1]), "the corpus must matter"
        plain = want


def random_corpus(slots, lead):
    """Predictions and a ring of two owners, with ends of texts in them."""
    predicted_SP = torch.randint(5, (slots, lead + 23), dtype=torch.int32, device=DEVICE)
    # Slot 0 repeats no token of its own, so that its drafts are from here.
    predicted_SP[0, lead:] = torch.arange(45, 68)
    predicted_SP[:, -4:] = -1
    ring_N = torch.randint(-1, 5, (45,), dtype=torch.int32, device=DEVICE)
    owner_N, owner_S = torch.arange(45, device=DEVICE) // 23, torch.arange(slots, device=DEVICE) % 3
    return Corpus(predicted_SP, ring_N, owner_N, owner_S, lead)


@pytest.mark.parametrize(("most", "dtype"), [(1, torch.int64), (5, torch.int32)])
def test_write_drafts(most, dtype):
    """Some counts are more than a row wants or less than none, and some ids are outside of the vocabulary of 9."""
    slots, capacity, rows = 9, 40, 8
    drafts_BK = torch.randint(-1, 11, (rows, most), device=DEVICE).to(dtype)
    drafts_BK[0] = torch.arange(most, device=DEVICE)
    count_B = torch.randint(-1, most + 2, (rows,), device=DEVICE).to(dtype)
    most_B = torch.randint(most + 1, (rows, 2), device=DEVICE)[:, 1]
    count_B[0] = most_B[0] = most
    slots_B = torch.randperm(slots - 1, device=DEVICE)[:rows]
    lengths_B = torch.randint(1, capacity - most, (rows,), device=DEVICE)
    tokens_SL = torch.randint(9, (slots, capacity), dtype=torch.int32, device=DEVICE)
    states = [(tokens_SL.clone(), torch.full((slots,), 7, device=DEVICE)) for _ in range(2)]
    for write, state in zip((write_drafts_triton, write_drafts_reference), states, strict=True):
        write(drafts_BK, count_B, slots_B, lengths_B, most_B, *state, 9)
    assert all(map(torch.equal, *states)) and int(states[0][1][slots_B[0]]) == most
