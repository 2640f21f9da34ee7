"""Which batch sizes get a graph, and whose draws one makes."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.core.engine.device_state import SlotInfo
from dovetail.core.engine.graphs import batch_sizes
from dovetail.core.interfaces import JoinBlob, Request, SamplingParams


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 300, 512, 1000])
def test_spare_rows_are_few(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert (size - rows) / size < (1 / 3 if rows > 8 else 2 / 5), (rows, size)
        assert size <= 128 or size % 32 == 0 or size == most


@pytest.mark.parametrize(
    ("options", "processors", "plain"),
    [
        ({"temperature": 0.0}, (), True),
        ({"temperature": 0.7, "seed": 3}, (), True),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, (), True),
        ({"temperature": 0.7, "top_k": 5}, (), False),
        ({"temperature": 0.7, "top_p": 0.5}, (), False),
        ({"temperature": 0.7, "min_p": 0.1}, (), False),
        ({"temperature": 0.0, "logprobs": 0}, (), False),
        ({"temperature": 0.0}, ("penalties",), False),
    ],
)
def test_captured_draws_know_logits_and_temperature_alone(
    options: dict[str, Any], processors: tuple[str, ...], plain: bool
) -> None:
    request = Request(1, (1, 2), SamplingParams(**options), processors=processors)
    info = SlotInfo(1, 0, JoinBlob((1, 2), request, 0))
    assert (info.plain, info.random) == (plain, options["temperature"] > 0)
