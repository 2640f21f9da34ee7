"""Facts of this machine and of a model, for the capability check. Planning reads them without importing torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dovetail.core.compose import Host
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import ModelSpec

if TYPE_CHECKING:
    import torch


def detect_host(device: str) -> Host:
    """Describe this machine. `device`: engine.device; "auto" is CUDA where there is a GPU."""
    import torch

    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Host(device="cpu", memory_bytes=memory, platform=sys.platform)
    if not torch.cuda.is_available():
        return Host(device="cuda", platform=sys.platform)
    properties = torch.cuda.get_device_properties(0)
    return Host(
        device="cuda",
        device_count=torch.cuda.device_count(),
        compute_capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        platform=sys.platform,
    )


def shared_bytes(device: torch.device) -> int:
    """Return the maximum shared memory of a program on this GPU, in bytes."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    # Some versions of PyTorch only tell what a program has without asking for more.
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


def model_facts(spec: ModelSpec) -> Mapping[str, object]:
    """Facts of a checkpoint that other parts may require."""
    return {
        "architecture": spec.architecture,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden": spec.hidden,
        "intermediate": spec.intermediate,
        "layers": spec.layers,
        "vocab": spec.vocab,
        "max_len": spec.max_len,
        "dtype": spec.dtype,
        "windowed": any(spec.windows),
        "experts": spec.moe is not None,
        "compressed_kv": spec.mla is not None,
    }


def gpu_of(rank: int, first_gpu: int) -> int:
    """Return the index of the rank's GPU. Raises ConfigError if this host has fewer."""
    import torch

    count, gpu = torch.cuda.device_count(), first_gpu + rank
    if gpu >= count:
        why = f" (torch {torch.__version__} is built without CUDA)" if torch.version.cuda is None else ""
        raise ConfigError(
            f"engine.device=cuda: rank {rank} needs GPU {gpu} (engine.first_gpu={first_gpu}), this host has "
            f"{count}{why}; use engine.device=cpu, fewer ranks (engine.tp) or fewer replicas (engine.dp)"
        )
    return gpu
