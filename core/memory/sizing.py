"""How many KV pages fit: what the device has, less weights, activations of the costliest step, and others' memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from dovetail.core.errors import CapacityError
from dovetail.core.interfaces import KVGroup


def page_count(group: KVGroup, tokens: int) -> int:
    """Pages of one sequence of so many tokens."""
    return -(-tokens // group.page_tokens)


def measure_pages(
    groups: Sequence[KVGroup],
    device: torch.device,
    *,
    fraction: float,
    wanted_tokens: int,
    rehearse: Callable[[], None],
) -> dict[int, int]:
    """Pages per group. On CUDA `rehearse` runs the most expensive step and the rest of `fraction` goes to KV; on a CPU
    the cache takes what wanted_tokens need, bounded by half of `fraction` of free memory, since other ranks live there
    too."""
    bytes_per_token = sum(group.bytes_per_page / group.page_tokens for group in groups)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        rehearse()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        peak = torch.cuda.max_memory_allocated(device)
        free, total = torch.cuda.mem_get_info(device)
        foreign = total - free - torch.cuda.memory_reserved(device)
        budget = total * fraction - peak - foreign
        tokens = int(budget / bytes_per_token)
        gib = 2**30
        where = f"{total / gib:.1f} GiB x engine.memory_fraction={fraction}, of it {peak / gib:.1f} GiB for the model"
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        budget = free * fraction / 2
        tokens = min(wanted_tokens, int(budget / bytes_per_token))
        where = f"half of {free / 2**30:.1f} GiB free memory x engine.memory_fraction={fraction}"
    pages = {group.id: tokens // group.page_tokens for group in groups}
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
