"""Programmatic dependent launch (PDL): a kernel starts while the preceding one ends, which hides the launch time.

Until the preceding kernel has ended, a kernel may access only weights and data older than any kernel that may still
run. Small kernels allow the next launch at their start. Matmuls fill every SM and allow it only near their end, since
the waiting blocks of the next kernel would take their resources.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

log = logging.getLogger(__name__)

HOPPER = (9, 0)
PREFER_SHARED = 1
"""CU_FUNC_CACHE_PREFER_SHARED."""


@triton.jit
def announce(PDL: tl.constexpr):
    """Allow the next kernel to launch as soon as SMs have room for it."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the preceding kernels. Call it before the first access to data that a running kernel may use."""
    if PDL:
        gdc_wait()


@triton.jit
def prefetch(pointers, ok):
    """Prefetch the cache lines of these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "{.reg .pred ok; setp.ne.b32 ok, $2, 0; @ok prefetch.global.L2 [$1]; mov.u32 $0, 0;}",
        "=r,l,r",
        [pointers, ok.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def dependent(tensor: torch.Tensor) -> dict[str, Any]:
    """Launch arguments for a kernel that calls `announce` and `wait`."""
    if tensor.is_cuda and _capable(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def keep_shared_memory(device: torch.device) -> None:
    """Make the driver prefer shared memory over L1 cache for all kernels of this process.

    Otherwise it chooses the carve-out per kernel. A change needs an idle SM, so a matmul would have to wait until the
    small preceding kernel has ended, in spite of programmatic dependent launch.
    """
    if device.type == "cuda" and torch.version.cuda is not None:
        # Creates the CUDA context.
        torch.cuda.synchronize(device)
        try:
            failed = ctypes.CDLL("libcuda.so.1").cuCtxSetCacheConfig(PREFER_SHARED)
        except (OSError, AttributeError) as error:
            failed = error
        if failed:
            log.warning("the CUDA driver does not prefer shared memory (%s): steps with few rows take longer", failed)


@cache
def _capable(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= HOPPER
