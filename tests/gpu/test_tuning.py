"""Operations as the tuner runs them: every one has candidates that are right, and times."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from dovetail.core.compose import compose
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
    composition = compose(["model=llama3_8b", "attention=triton", f"quant={quant}", "engine.max_len=1024"])
    device = torch.device("cuda", 0)
    gpu = torch.cuda.get_device_properties(device).name
    found = distinct(tunables_without_weights(composition, device, [4, 100]))
    assert {one.op for one in found} >= OPS[quant]
    timer = GraphTimer(gpu, 1)
    with torch.inference_mode():
        # Of matmuls all shapes: the library with more rows leaves the scales of some to their consumer.
        for tunable in {(one.op, one.rows, one.key if one.op == "matmul" else None): one for one in found}.values():
            tried = list(islice(tunable.candidates(), 2))
            timed = measure(tunable, timer, gpu, tried, finals=2)
            assert any(choice is not None for choice, _ in timed.times), f"{tunable.op}: no candidate is right"
            assert all(us > 0 for _, us in timed.times)
            assert not caplog.messages, "a right choice was refused"
    timer.close()
