"""Programmatic dependent launch: a kernel of ours starts while the one before it ends.

A kernel waits until the one before has ended before it touches anything but weights and what is older than any kernel
that may still run, so that its launch costs no time between the two. Small kernels announce at their start that the
next one may come in; products, which fill every multiprocessor, do not, and the next one comes in as they end: its
waiting blocks would take their room.
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
    """First thing in a kernel: the next one may be brought in as soon as multiprocessors have room."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Before the first access to anything that a kernel which may still run reads or writes."""
    if PDL:
        gdc_wait()


@triton.jit
def prefetch(pointers, ok):
    """Bring the cache lines of these addresses into the L2 cache; nothing waits for them."""
    tl.inline_asm_elementwise(
        "{.reg .pred ok; setp.ne.b32 ok, $2, 0; @ok prefetch.global.L2 [$1]; mov.u32 $0, 0;}",
        "=r,l,r",
        [pointers, ok.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def dependent(tensor: torch.Tensor) -> dict[str, Any]:
    """Launch arguments of a kernel that calls `announce` and `wait`."""
    if tensor.is_cuda and _capable(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def keep_shared_memory(device: torch.device) -> None:
    """Every kernel of this process leaves a multiprocessor's memory shared, which else is its cache wherever the driver
    finds a kernel that shares little. The memory is divided anew only where nothing runs, so that a product would wait
    on such multiprocessors until the small kernel in front has ended, for all that `dependent` says.
    """
    if device.type == "cuda" and torch.version.cuda is not None:
        # There is a context from here on.
        torch.cuda.synchronize(device)
        try:
            failed = ctypes.CDLL("libcuda.so.1").cuCtxSetCacheConfig(PREFER_SHARED)
        except (OSError, AttributeError) as error:
            failed = error
        if failed:
            log.warning("the CUDA driver does not keep shared memory (%s): steps of few rows take longer", failed)


@cache
def _capable(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= HOPPER
