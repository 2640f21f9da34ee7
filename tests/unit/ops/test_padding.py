"""Memory after the last row of activations."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.ops.padding import MOST_PADDED, empty_rows, padded, readable_rows


def test_rows_are_padded_to_whole_tiles():
    for rows in range(1, MOST_PADDED + 1):
        for tile in (16, 32, 64, 128, 256):
            if tile <= rows or padded(rows) >= tile:
                assert padded(rows) >= -(-rows // tile) * tile
        assert rows <= padded(rows) < 2 * rows or rows == 1
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
