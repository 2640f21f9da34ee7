"""Resolve the dtype and device names of the config."""

from __future__ import annotations

import torch

from dovetail.core.errors import ConfigError
from dovetail.core.host import gpu_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {**DTYPES, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def resolve_device(name: str, rank: int, first_gpu: int = 0) -> torch.device:
    """Return the rank's device. "auto" is CUDA if there is a GPU. Rank r takes GPU `first_gpu` + r."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        return torch.device("cuda", gpu_of(rank, first_gpu))
    return torch.device(name)


def resolve_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """Return the dtype. "auto" is the checkpoint's on a GPU and float32 on a CPU, where 16-bit matmuls are slow."""
    if name == "auto":
        name = checkpoint if device.type == "cuda" else "float32"
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def resolve_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of KV pages. "auto" is the activations' dtype."""
    if name == "auto":
        return dtype
    if name not in KV_DTYPES:
        raise ConfigError(f"kv_dtype {name!r} is not one of auto, {', '.join(KV_DTYPES)}")
    return KV_DTYPES[name]
