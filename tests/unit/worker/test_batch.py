"""A step's rows by column say what the rows say one by one."""

import random

import numpy as np
import pytest
import torch

from dovetail.core.interfaces import Row, RowFlag, RowResult
from dovetail.core.worker.batch import Rows
from dovetail.core.worker.result_copies import ResultCopies
from dovetail.core.worker.sampling import Sampled, chunk_section, sampling_section

SAMPLE, DECODE, LATE = RowFlag.SAMPLE, RowFlag.DECODE, RowFlag.LATE
DECODES = (DECODE | SAMPLE, DECODE | SAMPLE | LATE, DECODE)
CHUNKS = (SAMPLE, SAMPLE | LATE, RowFlag(0))


def some_rows(rng: random.Random, decodes: int, chunks: int) -> list[Row]:
    """In canonical order."""
    rows = []
    for slot in rng.sample(range(20), decodes):
        draft = rng.randrange(3)
        rows.append(Row(slot, 100 + slot, 0, 1 + draft, rng.randrange(5, 90), draft, int(rng.choice(DECODES))))
    for slot in rng.sample(range(20, 40), chunks):
        count = rng.randrange(1, 9)
        rows.append(Row(slot, 100 + slot, 1, count, count + rng.randrange(50), 0, int(rng.choice(CHUNKS))))
    return rows


@pytest.mark.parametrize(("decodes", "chunks"), [(5, 0), (0, 4), (1, 1), (6, 5)])
def test_columns_say_what_rows_do(decodes: int, chunks: int) -> None:
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
        assert sampling_section(rows, starts).tolist() == [list(each) for each in expected]
        moved = [(row.slot, row.count) for row in listed if not row.flags & SAMPLE]
        assert chunk_section(rows) == [number for each in moved for number in each]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("sat_out", [False, True], ids=["all_sampled", "one_without_its_mask"])
def test_results_stand_in_the_order_of_rows(width: int, sat_out: bool) -> None:
    """A chunk that does not sample, and a row that sat the step out, bring no token."""
    listed = [Row(slot, 10 + slot, slot, 1, 9, 0, int(DECODE | SAMPLE)) for slot in range(3)]
    listed += [Row(3, 13, 0, 4, 4, 0, 0), Row(4, 14, 0, 4, 4, 0, int(SAMPLE))]
    tokens_RW = torch.arange(100, 100 + 4 * width).view(4, width)
    accepted_R = torch.tensor([0, -1 if sat_out else 0, width - 1, 0])
    outcomes = ResultCopies(torch.device("cpu"))
    began = outcomes.clock.mark()
    outcomes.send(7, began, Rows(listed), {}, Sampled(tokens_RW, accepted_R, accepted_R, accepted_R), {}, None)
    result = outcomes.collect()
    kept = iter(tuple(row[: int(n) + 1]) for row, n in zip(tokens_RW.tolist(), accepted_R, strict=True))
    expected = [RowResult(i, row.uid, row.epoch, next(kept) if row.flags else ()) for i, row in enumerate(listed)]
    assert (result.step, list(result.rows)) == (7, expected)
