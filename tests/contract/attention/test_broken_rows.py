"""Attention backends that are wrong only in some rows; each case states what the failure must say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.core.interfaces import AttentionLayer, BatchMeta

from ..faults import rejection
from .test_broken import Sound, fault, suite_of


def forgets_keys_after_512(self: Sound, layer: AttentionLayer, at: int, key_L: torch.Tensor, *rest: Any) -> Any:
    """Merges only the first part of a long row."""
    return Sound.seen(self, layer, at, key_L, *rest) & ((key_L < 512) | (key_L == at))


def takes_the_position(
    self: Sound, layer: AttentionLayer, at: int, key_L: torch.Tensor, meta: BatchMeta, row: int, token: int
) -> torch.Tensor:
    return Sound.seen(self, layer, int(meta.positions_T[token]), key_L, meta, row, token)


CASES = [
    (fault("ForgetsKeysAfter512", seen=forgets_keys_after_512), "rows_may_be_long"),
    (fault("TakesThePosition", seen=takes_the_position), "indices_are_counted_back_from_the_length"),
]


@pytest.mark.parametrize(("broken", "test"), CASES, ids=[broken.__name__ for broken, _ in CASES])
def test_the_suite_rejects(broken: type[Sound], test: str) -> None:
    assert "attention output of layer" in rejection(suite_of(broken), f"test_{test}")
