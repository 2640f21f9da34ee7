"""Which products go to the kernel, and what the operation gives where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.ops.matmul import matmul, scaled_matmul
from dovetail.core.ops.tiles import MOST_ROWS, MOST_SHARED_TILES, choose

FP8 = "float8_e4m3fn"


@pytest.mark.parametrize("outputs", [64, 4096, 6144, 8192, 28672, 57344])
@pytest.mark.parametrize("processors", [84, 132, 160])
@pytest.mark.parametrize("tokens", [1, 16, 17, 33, 64])
def test_rule_of_unmeasured_shapes(tokens, outputs, processors):
    tile = choose(tokens, outputs, 5120, FP8, "a GPU", processors)
    t_tiles, tiles, _, programs = tile.launch(tokens, outputs, 5120)
    assert t_tiles == 1 and tile.tokens >= tokens
    assert tile.split == 1 or (programs <= processors and tiles <= MOST_SHARED_TILES)


def test_the_rest_is_the_librarys():
    assert choose(MOST_ROWS + 1, 4096, 4096, FP8, "a GPU", 132) is None
    assert choose(1, 4096, 4096, "bfloat16", "a GPU", 132) is None


def test_reference_on_the_cpu():
    torch.seed()
    x_TI, weight_OI = (torch.randn(n, 32).to(torch.float8_e4m3fn) for n in (3, 16))
    x_scale_T1, weight_scale_O, bias_O = torch.rand(3, 1) + 0.5, torch.rand(16) + 0.5, torch.randn(16)
    counts = torch.zeros(MOST_SHARED_TILES, dtype=torch.int32)
    got = scaled_matmul(x_TI, weight_OI, x_scale_T1, weight_scale_O, bias_O, torch.float32, counts)
    scaled = (x_TI.double() * x_scale_T1) @ (weight_OI.double() * weight_scale_O[:, None]).t() + bias_O
    torch.testing.assert_close(got, scaled.float())
    plain = matmul(x_TI.float(), weight_OI.float(), bias_O)
    torch.testing.assert_close(plain, (x_TI.double() @ weight_OI.double().t() + bias_O).float())
