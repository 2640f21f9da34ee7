"""Columns, packed sections and results of a step's rows."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch

from dovetail.core.interfaces import Row, RowFlag, RowResult, TokenLogprobs
from dovetail.core.worker.batch import Rows
from dovetail.core.worker.result_copies import ResultCopies
from dovetail.core.worker.row_sections import GraphSections, pack_chunks, pack_samples, sample_padding, unpack_samples
from dovetail.core.worker.sampling import SampledRows

SAMPLE, DECODE, LATE = RowFlag.SAMPLE, RowFlag.DECODE, RowFlag.LATE
DECODES = (DECODE | SAMPLE, DECODE | SAMPLE | LATE, DECODE)
CHUNKS = (SAMPLE, SAMPLE | LATE, RowFlag(0))
SCRATCH = 40


def some_rows(rng: random.Random, decodes: int, chunks: int) -> list[Row]:
    """Return random rows in canonical order."""
    rows = []
    for slot in rng.sample(range(20), decodes):
        draft = rng.randrange(3)
        rows.append(Row(slot, 100 + slot, 0, 1 + draft, rng.randrange(5, 90), draft, int(rng.choice(DECODES))))
    for slot in rng.sample(range(20, 40), chunks):
        count = rng.randrange(1, 9)
        rows.append(Row(slot, 100 + slot, 1, count, count + rng.randrange(50), 0, int(rng.choice(CHUNKS))))
    return rows


@pytest.mark.parametrize(("decodes", "chunks"), [(5, 0), (0, 4), (1, 1), (6, 5)])
def test_columns_and_sections_hold_the_numbers_of_the_rows(decodes: int, chunks: int) -> None:
    rng = random.Random(decodes)
    for _ in range(20):
        listed = some_rows(rng, decodes, chunks)
        rows, starts = Rows(listed), np.cumsum([0, *(row.count for row in listed)]).tolist()
        sampled = [i for i, row in enumerate(listed) if row.flags & SAMPLE]
        assert (len(rows), rows.decodes, rows.starts) == (decodes + chunks, decodes, starts)
        assert [*rows.sampled] == sampled and [*rows.sampled_slots] == [listed[i].slot for i in sampled]
        assert rows.width == 1 + max(row.draft for row in listed)
        assert rows.max_len == 1 + max(row.bound for row in listed)
        last = [0 if row.flags & DECODE else row.count - 1 for row in listed]
        expected = [(starts[i] + last[i], listed[i].slot, listed[i].draft) for i in sampled]
        assert pack_samples(rows, starts).tolist() == [list(each) for each in expected]
        moved = [(row.slot, row.count) for row in listed if not row.flags & SAMPLE]
        assert pack_chunks(rows) == [number for each in moved for number in each]


def test_sample_positions_repeat_a_row_s_last_draft() -> None:
    rows = Rows([Row(3, 1, 0, 3, 9, 2, DECODE | SAMPLE), Row(5, 2, 0, 1, 9, 0, DECODE | SAMPLE)])
    section = torch.from_numpy(np.concatenate((pack_samples(rows, rows.starts), sample_padding(2, SCRATCH))))
    at = unpack_samples(section.reshape(-1), rows, torch.tensor([6, 7, 8, 4]))
    assert at.token_RW.tolist() == [[0, 1, 2], [3, 3, 3]] and at.slots_R.tolist() == [3, 5]
    assert at.base_R.tolist() == [7, 5] and at.limit_R.tolist() == [2, 0]


@pytest.mark.parametrize(("decodes", "chunks"), [(0, 2), (3, 1), (5, 4)])
def test_a_mixed_graph_reads_the_rows_and_padding_between_them(decodes: int, chunks: int) -> None:
    listed = some_rows(random.Random(chunks), decodes, chunks)
    rows, sections = Rows(listed), GraphSections(decodes=6, chunks=4, samples=10)
    samples = pack_samples(rows, rows.starts)
    input_N = sections.padding(SCRATCH, torch.device("cpu"))
    packed = torch.tensor(sections.pack(rows, rows.starts, samples.reshape(-1), SCRATCH))
    input_N[: len(packed)] = packed
    slots_B, row_start_B1, chunks_N, samples_R3 = sections.unpack(input_N, width=3)
    counts = row_start_B1.diff().tolist()
    real = [(row.slot, row.count) for row in listed]
    assert [pair for pair in zip(slots_B.tolist(), counts, strict=True) if pair[0] != SCRATCH] == real
    assert [slots_B.tolist()[i] for i in range(10) if not decodes <= i < 6 and i < 6 + chunks] == [s for s, _ in real]
    assert sum(counts) == sum(row.count for row in listed), "padding rows have no tokens"
    assert samples_R3[: len(samples)].tolist() == samples.tolist()
    assert (samples_R3[len(samples) :, 1] == SCRATCH).all()
    moved = [(row.slot, row.count) for row in listed if not row.flags & SAMPLE]
    assert chunks_N.view(-1, 2).tolist() == [*map(list, moved), *[[SCRATCH, 0]] * (4 - len(moved))]


def test_a_graph_of_ragged_rows_reads_rows_and_starts() -> None:
    listed = some_rows(random.Random(3), 4, 0)
    rows, sections = Rows(listed), GraphSections(decodes=6, chunks=0, samples=6, ragged=True)
    samples = np.concatenate((pack_samples(rows, rows.starts), sample_padding(6 - len(rows.sampled), SCRATCH)))
    input_N = sections.padding(SCRATCH, torch.device("cpu"))
    packed = torch.tensor(sections.pack(rows, rows.starts, samples.reshape(-1), SCRATCH))
    assert len(packed) == len(input_N)
    slots_B, row_start_B1, chunks_N, samples_R3 = sections.unpack(packed, width=3)
    assert slots_B.tolist() == [*(row.slot for row in listed), SCRATCH, SCRATCH] and not len(chunks_N)
    assert row_start_B1.diff().tolist() == [*(row.count for row in listed), 0, 0]
    assert samples_R3.tolist() == samples.tolist()


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("sat_out", [False, True], ids=["all_sampled", "one_without_its_mask"])
def test_results_are_in_row_order(width: int, sat_out: bool) -> None:
    """Neither a chunk that does not sample nor a row without its mask returns a token or drafts."""
    listed = [Row(slot, 10 + slot, slot, 1, 9, 0, int(DECODE | SAMPLE)) for slot in range(3)]
    listed += [Row(3, 13, 0, 4, 4, 0, 0), Row(4, 14, 0, 4, 4, 0, int(SAMPLE))]
    tokens_RW = torch.arange(100, 100 + 4 * width).view(4, width)
    accepted_R = torch.tensor([0, -1 if sat_out else 0, width - 1, 0])
    results = ResultCopies(torch.device("cpu"))
    began = results.clock.mark()
    drafted_R = torch.tensor([width - 1, 0, width - 1, 0])
    sampled = SampledRows(tokens_RW, accepted_R, accepted_R, accepted_R, drafted_R)
    results.send(7, began, Rows(listed), {}, sampled, {}, None)
    result = results.collect()
    kept = iter([(*row[: int(n) + 1],) for row, n in zip(tokens_RW.tolist(), accepted_R, strict=True)])
    counts = iter(drafted_R.tolist())
    expected = [
        RowResult(i, row.uid, row.epoch, next(kept) if row.flags else (), drafted=next(counts) if row.flags else 0)
        for i, row in enumerate(listed)
    ]
    assert (result.step, list(result.rows)) == (7, expected)


def test_log_probabilities_are_those_of_the_tensors() -> None:
    """Entries of rows that accept 0 to 2 drafts and want 0 to 4 tokens; the last row wants none."""
    width, most, accepted, wanted = 3, 4, (0, 2, 1, 2), {0: 4, 1: 0, 2: 3}
    listed = [Row(slot, 10 + slot, slot, 1, 9, 0, int(DECODE | SAMPLE)) for slot in range(4)]
    chosen, values = torch.randn(4, width), torch.randn(4, width, most)
    ids, tokens_RW = torch.randint(0, 1000, (4, width, most)), torch.zeros(4, width, dtype=torch.int64)
    results = ResultCopies(torch.device("cpu"))
    accepted_R = torch.tensor(accepted)
    sampled = SampledRows(tokens_RW, accepted_R, accepted_R, accepted_R, accepted_R, (chosen, values, ids))
    prompt = {3: [chosen.view(-1, 1), values.view(12, most), ids.view(12, most)]}
    results.send(7, results.clock.mark(), Rows(listed), wanted, sampled, prompt, None)
    found = results.collect().rows

    def entry(row: int, at: int, top: int) -> TokenLogprobs:
        best = zip(ids[row, at, :top].tolist(), values[row, at, :top].tolist(), strict=True)
        return TokenLogprobs(chosen[row, at].item(), tuple(best))

    expected = [[entry(row, at, wanted[row]) for at in range(accepted[row] + 1)] for row in wanted]
    for values_of_step in (chosen, values, ids):
        values_of_step.zero_()  # as the next step may
    assert [list(result.logprobs) for result in found] == [*expected, []]
    first, second = found[1].logprobs, found[2].logprobs
    assert (first[-1], list(first[1:]), len(second[:1])) == (expected[1][2], expected[1][1:], 1)
    assert first == tuple(expected[1]) and first != second and pickle.loads(pickle.dumps(second)) == tuple(expected[2])
    assert len(found[3].prompt_logprobs) == 12 and all(len(entry.top) == most for entry in found[3].prompt_logprobs)
