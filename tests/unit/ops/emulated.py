"""What launches of all kernels share: tensors on an emulated GPU, number formats, whether to launch everything."""

from __future__ import annotations

import os

import torch

from dovetail.core.compose.capabilities import FP8_HARDWARE
from dovetail.core.interfaces import BatchMeta, HostBounds, TreeMask

EVERYTHING = os.environ.get("DOVETAIL_KERNELS") == "all"
"""Whether to launch more shapes, which .ci/nightly does."""
BF16, FP16, FP32, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
INT32, INT64 = torch.int32, torch.int64


def cuda(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def has_fp8() -> bool:
    return torch.cuda.get_device_capability() >= FP8_HARDWARE


def batch(host: HostBounds, page: int, tree: bool) -> BatchMeta:
    """A step's rows with pages of `page` tokens; `tree`: whether decode rows have draft trees."""
    rows, tokens = len(host.counts), sum(host.counts)
    return BatchMeta(
        row_start_B1=cuda(rows + 1, dtype=INT32),
        kv_len_B=cuda(rows, dtype=INT32),
        slots_B=cuda(rows, dtype=INT64),
        positions_T=cuda(tokens, dtype=INT64),
        rows_T=cuda(tokens, dtype=INT64),
        page_table_BP=cuda(rows, -(-max(host.bounds) // page), dtype=INT32),
        write_T=cuda(tokens, dtype=INT64),
        page_tokens=page,
        tree=TreeMask(*(cuda(tokens, dtype=INT64) for _ in range(2))) if tree else None,
    )
