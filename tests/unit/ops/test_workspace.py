"""The memory in which packed weights are decoded."""

import gc

import torch

from dovetail.core.ops.packed_matmul import reserve

CPU = torch.device("cpu")


def test_a_workspace_lives_as_long_as_a_layer_that_may_have_captured_it():
    small = reserve(8, 16, torch.bfloat16, CPU)
    assert reserve(4, 16, torch.bfloat16, CPU) is small, "one for all that fit"
    small.fill_(7)
    large = reserve(64, 64, torch.float32, CPU)
    assert large.numel() == 64 * 64 * 4 and reserve(8, 16, torch.bfloat16, CPU) is large
    assert (small == 7).all() and small.data_ptr() != large.data_ptr(), "a graph may still write there"


def test_a_workspace_is_freed_with_the_last_layer():
    gc.collect()
    held = reserve(1000, 1000, torch.float32, CPU)
    assert reserve(1, 1, torch.float32, CPU) is held
    del held
    gc.collect()
    assert reserve(1, 1, torch.float32, CPU).numel() == 4
