"""Division of KV cache bytes between groups of layers."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.interfaces import KVGroup, Plane, SchedulerLimits
from dovetail.core.memory.sizing import longest_alone, split_tokens, wanted_tokens
from dovetail.core.testing.executor_scripts import SMALL_LLAMA, quiet, small_composition
from dovetail.core.worker.loader import load_rank

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


@pytest.mark.parametrize("allocator", ["prefix_hash", "radix", "contiguous"])
def test_the_default_pages_hold_a_sequence_of_the_whole_context(allocator: str) -> None:
    """Some allocators keep pages that have left the attention window."""
    shape = SMALL_LLAMA.replace("Llama", "Mistral").replace("}", ", sliding_window: 7}")
    sizes = "engine.kv_pages=null", "engine.max_seqs=1", "engine.token_budget=11"
    composition = small_composition(f"model.hf={shape}", f"kv_cache={allocator}", *sizes)
    info = load_rank(composition, quiet).info
    kv = composition.build("kv_cache", groups=info.groups, num_pages=info.num_pages)
    assert longest_alone(kv, SchedulerLimits(11, 1, info.max_len)) == info.max_len
