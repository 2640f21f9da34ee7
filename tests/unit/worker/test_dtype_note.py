"""The note of a model that runs in float32 on a GPU."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.startup_notes import collect_notes
from dovetail.core.worker.loader import _note_float32


@pytest.mark.parametrize(
    ("chosen", "dtype", "device", "noted"),
    [
        ("auto", torch.float32, "cuda", True),
        ("auto", torch.float32, "cpu", False),
        ("auto", torch.bfloat16, "cuda", False),
        ("float32", torch.float32, "cuda", False),
    ],
)
def test_float32_on_a_gpu_is_noted_unless_it_was_chosen(chosen, dtype, device, noted):
    with collect_notes() as notes:
        _note_float32(chosen, dtype, torch.device(device))
    assert any("engine.dtype=bfloat16" in line for line in notes) is noted
