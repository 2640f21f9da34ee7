"""A step's bookkeeping kernels against their torch references, compiled or interpreted (see test_kernels.py)."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from dovetail.core.interfaces import LogitsContext, Request, SamplingParams  # noqa: E402
from dovetail.core.ops.features import keep_features_reference  # noqa: E402
from dovetail.core.ops.kernels.draw import gather_params_triton  # noqa: E402
from dovetail.core.ops.kernels.features import keep_features_triton  # noqa: E402
from dovetail.core.ops.kernels.step import (  # noqa: E402
    accept_triton,
    gather_samples_triton,
    lay_out_pages_triton,
    lay_out_tokens_triton,
    simulate_triton,
    write_drafts_triton,
)
from dovetail.core.ops.samples import SampleInputs, gather_samples_reference  # noqa: E402
from dovetail.core.ops.step import (  # noqa: E402
    accept_reference,
    lay_out_pages_reference,
    lay_out_tokens_reference,
    write_drafts_reference,
)
from dovetail.core.testing.interpreter import mend_interpreter  # noqa: E402
from dovetail.core.testing.numeric import poisoned_memory  # noqa: E402
from dovetail.core.worker.simulated_acceptance import simulate_reference  # noqa: E402
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


@pytest.mark.parametrize("widths", [(24,), (16, 16, 16), (5, 3000)])
@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 0, 1, 5), (40, 2)])
def test_kept_features(counts, widths):
    """Rows without tokens, with fewer tokens than places and with more, of slots in any order. All else is left as it
    was, but for the last slot."""
    places, slots = 5, 7
    row_start_B1 = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
    slots_B = torch.randperm(slots, device=DEVICE)[: len(counts)]
    length_B = torch.tensor(counts, device=DEVICE) + torch.randint(50, (len(counts),), device=DEVICE)
    # Tokens of padding are behind those of the rows.
    parts_TC = [torch.randn(sum(counts) + 3, width, device=DEVICE) for width in widths]
    kept_SWF = torch.randn(slots + 1, places, sum(widths), device=DEVICE)
    expected_SWF, got_SWF, referred_SWF = (kept_SWF.clone() for _ in range(3))
    features_TF = torch.cat(parts_TC, 1)
    for row, count in enumerate(counts):
        for back in range(min(count, places)):
            position = length_B[row] - 1 - back
            expected_SWF[slots_B[row], position % places] = features_TF[row_start_B1[row + 1] - 1 - back]
    for keep, into_SWF in ((keep_features_triton, got_SWF), (keep_features_reference, referred_SWF)):
        keep(parts_TC, slots_B, row_start_B1, length_B.int(), into_SWF)
        assert torch.equal(into_SWF[:-1], expected_SWF[:-1])


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


def test_parameters_of_slots():
    columns = [torch.randn(9, device=DEVICE) for _ in range(3)] + [torch.randint(99, (2, 9), device=DEVICE)[0]] * 2
    slots = torch.randint(9, (200,), device=DEVICE)
    assert all(map(torch.equal, gather_params_triton(slots, *columns), [column[slots] for column in columns]))


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


@pytest.mark.parametrize("width", [2, 5, 8])
def test_simulated_acceptance(width):
    rows, slots, capacity, vocab = 300, 40, 50, 11
    tokens_SL = torch.randint(vocab, (slots, capacity), dtype=torch.int32, device=DEVICE)
    key_S = torch.randint(1 << 62, (slots,), device=DEVICE)
    slots_R = torch.randint(slots, (rows,), device=DEVICE)
    base_R = torch.randint(capacity - width, (rows,), device=DEVICE)
    drawn_RW = torch.randint(-1, vocab, (rows, width), device=DEVICE)
    given = drawn_RW, slots_R, base_R, tokens_SL, key_S, torch.rand(width + 1, device=DEVICE), vocab
    assert torch.equal(simulate_triton(*given), simulate_reference(*given))


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
