"""Number of KV pages that fit: device memory less weights, peak activations, and memory of other processes."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import CapacityError
from dovetail.core.interfaces import KVAllocator, KVGroup, Plane, SchedulerLimits


def group_layers(
    windows: Sequence[int], planes: tuple[Plane, ...], page_tokens: int, first: int = 0
) -> tuple[KVGroup, ...]:
    """Group layers by attention window (0 = full); the layers of a group share pages. `windows`: one per layer.
    `first`: id of the first group."""
    layers_of: dict[int, list[int]] = {}
    for index, window in enumerate(windows):
        layers_of.setdefault(window, []).append(index)
    return tuple(
        KVGroup(id, tuple(layers), planes, "window" if window else "full", window, page_tokens)
        for id, (window, layers) in enumerate(layers_of.items(), first)
    )


def page_count(group: KVGroup, tokens: int) -> int:
    """Number of pages of one sequence with `tokens` tokens."""
    return ceil_div(tokens, group.page_tokens)


def wanted_tokens(
    groups: Sequence[KVGroup], *, sequences: int, max_len: int, ahead: int, budget: int
) -> dict[int, int]:
    """Token slots per group that `sequences` sequences of max_len tokens hold at once. `ahead`: tokens per sequence
    that decode steps write before publication. `budget`: tokens of all sequences in one step."""
    return {
        group.id: sequences * group.tokens_held(max_len, ahead) + (budget if group.window else 0) for group in groups
    }


def split_tokens(groups: Sequence[KVGroup], budget: float, most: Mapping[int, int]) -> dict[int, int]:
    """Divide `budget` bytes into equally many token slots per group, limited by `most`. The bytes that a limited group
    does not use go to the other groups."""
    tokens: dict[int, int] = {}
    rest = sorted(groups, key=lambda group: most.get(group.id, math.inf))
    while rest:
        share = max(int(budget / sum(group.bytes_per_page / group.page_tokens for group in rest)), 0)
        group = rest.pop(0)
        tokens[group.id] = min(share, most.get(group.id, share))
        budget -= tokens[group.id] * group.bytes_per_page / group.page_tokens
    return tokens


def measure_pages(
    groups: Sequence[KVGroup],
    device: torch.device,
    *,
    fraction: float,
    wanted: Mapping[int, int],
    warm_up: Callable[[], None],
) -> dict[int, int]:
    """Number of pages per group. On CUDA `warm_up` runs the most expensive step and the rest of `fraction` goes to KV.
    On a CPU the cache gets what the `wanted` tokens need, limited to half of `fraction` of free memory, since other
    ranks use the same memory. If there are groups without a window, window groups get at most what they want."""
    full = any(not group.window for group in groups)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        warm_up()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        peak = torch.cuda.max_memory_allocated(device)
        free, total = torch.cuda.mem_get_info(device)
        foreign = total - free - torch.cuda.memory_reserved(device)
        budget = total * fraction - peak - foreign
        most = {group.id: wanted[group.id] for group in groups if group.window and full}
        gib = 2**30
        where = f"{total / gib:.1f} GiB x engine.memory_fraction={fraction}, less {peak / gib:.1f} GiB for the model"
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        budget = free * fraction / 2
        most = dict(wanted)
        where = f"half of {free / 2**30:.1f} GiB free memory x engine.memory_fraction={fraction}"
    tokens = split_tokens(groups, budget, most)
    # A group that gets all that it wants has room for the last tokens of its sequences, too.
    pages = {
        group.id: tokens[group.id] // group.page_tokens
        if tokens[group.id] < most.get(group.id, math.inf)
        else page_count(group, tokens[group.id])
        for group in groups
    }
    if min(pages.values()) < 1:
        missing = int(max(group.bytes_per_page for group in groups) - budget)
        raise CapacityError(
            f"no room for a single KV page ({where})",
            missing_bytes=missing,
            settings=(
                "a higher engine.memory_fraction",
                "a lower engine.token_budget",
                "quant=int8 or a higher engine.tp",
            ),
        )
    return pages


def longest_alone(kv: KVAllocator, limits: SchedulerLimits) -> int:
    """Return the maximum length, up to the context, of a sequence that has the whole KV cache; 0 = none fits."""

    def excess(tokens: int) -> bool:
        return any(pages > kv.num_pages[group] for group, pages in kv.pages_needed(tokens, limits.ahead).items())

    return bisect_left(range(1, limits.max_len + 1), True, key=excess)


def short_of_cache(longest: int, context: int) -> Iterator[str]:
    """Yield a note if the cache holds no sequence of the whole context."""
    if longest < context:
        yield (
            f"the KV cache holds one sequence of at most {longest} tokens, less than the context of {context} "
            "(engine.max_len): requests without max_tokens end there; raise engine.kv_pages or engine.memory_fraction"
        )
