"""Calls that wait for a GPU are found on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dovetail.core.testing.host_sync import NoHostSync

X = torch.tensor([3.0, -1.0, 2.0])


@pytest.mark.parametrize(
    "call",
    [
        lambda: X.sum().item(),
        lambda: X.tolist(),
        lambda: bool(X[0] > 0),
        lambda: int(X[0]),
        lambda: max(X),
        lambda: X[X > 0],
        lambda: X.nonzero(),
        lambda: torch.where(X > 0),
        lambda: X.masked_select(X > 0),
        lambda: torch.equal(X, X),
        lambda: X.cpu(),
        lambda: X.repeat_interleave(torch.tensor([1, 2, 3])),
        lambda: [0, 1, 2][torch.tensor(1)],
    ],
)
def test_a_wait_is_found(call: Callable[[], object]) -> None:
    with pytest.raises(AssertionError, match=r"apply calls .*, which makes the host wait"), NoHostSync("apply"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.where(X > 0, X, 0.0),
        lambda: X[torch.tensor([2, 0])],
        lambda: X[None, :2],
        lambda: X.masked_fill(X > 0, 0.0),
        lambda: X.repeat_interleave(2),
        lambda: torch.repeat_interleave(torch.tensor([1, 2, 3]), output_size=6),
        lambda: X.shape[0] + len(X),
    ],
)
def test_what_stays_on_the_device_passes(call: Callable[[], object]) -> None:
    with NoHostSync("apply"):
        call()
