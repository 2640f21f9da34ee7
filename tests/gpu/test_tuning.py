"""Operations as the tuner runs them: every one has candidates that are right, and times."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from dovetail.core.compose import compose
from dovetail.core.ops.expert_choice import DOWN, UP
from dovetail.core.ops.sampling_programs import DRAW, FILTER
from dovetail.core.tuning.search import distinct, measure
from dovetail.core.tuning.timing import GraphTimer
from dovetail.core.worker.build import tunables_without_weights

OPS = {
    "none": {"matmul", "dovetail_attend_decode", DRAW, FILTER},
    "fp8": {"matmul", "dovetail_attend_decode", DRAW, FILTER},
    "w4a16": {"packed_matmul", "matmul", "dovetail_attend_decode", DRAW, FILTER},
}
"""Quantizer -> operations that can be tuned."""


@pytest.mark.parametrize("quant", OPS)
def test_candidates_are_right_and_timed(quant: str, caplog: pytest.LogCaptureFixture) -> None:
    check("llama3_8b", quant, [4, 100], OPS[quant], caplog)


@pytest.mark.parametrize("quant", ["none", "fp8", "fp8_block", "int8"])
def test_those_of_experts(quant: str, caplog: pytest.LogCaptureFixture) -> None:
    """Pairs that are a tile each, and sorted ones, with each number of rows that tiles may have."""
    check("qwen3_30b_a3b", quant, [2, 128], {UP, DOWN}, caplog, every=(UP, DOWN))


def check(
    model: str,
    quant: str,
    rows: list[int],
    ops: set[str],
    caplog: pytest.LogCaptureFixture,
    every: tuple[str, ...] = (),
) -> None:
    """`every`: the only operations to try, with every key; none = all, of which matmuls have several."""
    composition = compose([f"model={model}", "attention=triton", f"quant={quant}", "engine.max_len=1024"])
    device = torch.device("cuda", 0)
    gpu = torch.cuda.get_device_properties(device).name
    found = distinct(tunables_without_weights(composition, device, rows))
    assert {one.op for one in found} >= ops
    each = every or ("matmul",)
    timer = GraphTimer(gpu, 1)
    with torch.inference_mode():
        # Of matmuls all shapes: the library with more rows leaves the scales of some to their consumer.
        chosen = [one for one in found if not every or one.op in every]
        for tunable in {(one.op, one.rows, one.key if one.op in each else None): one for one in chosen}.values():
            tried = list(islice(tunable.candidates(), 2))
            timed = measure(tunable, timer, gpu, tried, finals=2)
            assert any(choice is not None for choice, _ in timed.times), f"{tunable.op}: no candidate is right"
            assert all(us > 0 for _, us in timed.times)
            assert not caplog.messages, "a right choice was refused"
    timer.close()
