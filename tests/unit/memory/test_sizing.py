"""Division of KV cache bytes between groups of layers."""

from __future__ import annotations

import torch

from dovetail.core.interfaces import KVGroup, Plane
from dovetail.core.memory.sizing import split_tokens, wanted_tokens

PLANES = (Plane("k", (1, 4), torch.float32),)
FULL = KVGroup(0, (0,), PLANES)
WINDOW = KVGroup(1, (1, 2, 3), PLANES, kind="window", window=64)
PER_TOKEN = 16


def test_what_a_window_group_does_not_need_goes_to_the_others() -> None:
    wanted = wanted_tokens((FULL, WINDOW), sequences=10, max_len=4096, ahead=2, budget=128)
    assert wanted == {0: 40960, 1: 10 * (64 + 2 + 15) + 128}
    most = {1: wanted[1]}
    assert split_tokens((WINDOW, FULL), PER_TOKEN * 4 * 100, most) == {0: 100, 1: 100}, "little memory: equal shares"
    tokens = split_tokens((WINDOW, FULL), PER_TOKEN * 100_000, most)
    assert tokens == {0: 100_000 - 3 * wanted[1], 1: wanted[1]}


def test_short_sequences_need_as_much_in_each_group() -> None:
    wanted = wanted_tokens((FULL, WINDOW), sequences=10, max_len=32, ahead=2, budget=0)
    assert wanted == {0: 320, 1: 320}
