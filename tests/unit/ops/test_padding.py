"""Memory after the last row of activations."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.ops.padding import LEAST_PADDED, MOST_PADDED, empty_rows, more_rows, padded, readable_rows


def test_rows_are_padded_to_whole_tiles():
    for rows in range(1, MOST_PADDED + 1):
        for tile in (16, 32, 64, 128, 256):
            if tile <= max(rows, LEAST_PADDED) or padded(rows) >= tile:
                assert padded(rows) >= -(-rows // tile) * tile
        assert rows <= padded(rows) < 2 * rows or padded(rows) == LEAST_PADDED
    assert padded(0) == 0 and padded(MOST_PADDED + 1) == MOST_PADDED + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_kernels_read_whole_tiles_only_where_memory_holds_them(dtype):
    x_TC = empty_rows(80, 48, dtype, torch.device("cpu"))
    assert x_TC.shape == (80, 48) and x_TC.is_contiguous()
    assert [readable_rows(x_TC, tile) for tile in (16, 64, 128, 256)] == [80, 128, 128, 80]
    # Of a part of the rows, what follows is readable as well.
    assert readable_rows(x_TC[:3], 16) == 16 and readable_rows(x_TC[70:], 64) == 10
    assert readable_rows(torch.empty(80, 48, dtype=dtype), 64) == 80
    assert readable_rows(torch.empty(0, 48, dtype=dtype), 64) == 0


def test_further_rows_are_those_in_memory_or_of_a_copy():
    x_TC = empty_rows(80, 48, torch.float32, torch.device("cpu")).fill_(1)
    longer = more_rows(x_TC, 128)
    assert longer.shape == (128, 48) and longer.data_ptr() == x_TC.data_ptr() and more_rows(x_TC, 80) is x_TC
    end = x_TC[70:]
    assert more_rows(end, 58).data_ptr() == end.data_ptr(), "rows from its own place in memory"
    # One row more than the memory has, and rows that are not next to each other.
    for short, rows in ((x_TC, 129), (end, 59), (x_TC[:, :40], 128), (torch.ones(48, 80).t(), 81)):
        copied = more_rows(short, rows)
        assert copied.shape == (rows, short.shape[1]) and copied.data_ptr() != short.data_ptr()
        assert torch.equal(copied[: len(short)], short) and copied.is_contiguous()
