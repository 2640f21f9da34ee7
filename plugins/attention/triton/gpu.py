"""Facts about the GPU that plans depend on, and what they are in Triton's interpreter."""

from __future__ import annotations

import logging
from functools import cache

import torch
import triton

from dovetail.core.host import shared_bytes
from dovetail.core.ops.kernels.launch import HOPPER
from dovetail.core.ops.tiles import HOPPER_SHARED

log = logging.getLogger(__name__)

INTERPRETED_PROCESSORS = 4
"""Number of SMs to plan for in Triton's interpreter."""


@cache
def has_hopper(device: torch.device) -> bool:
    """Whether GPU and Triton support the kernels for Hopper."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) != HOPPER:
        return False
    try:
        from dovetail.plugins.attention.triton.hopper import launch  # noqa: F401
    except (ImportError, AttributeError) as error:
        log.warning(
            "attention=triton: prompts, single tokens and latents use the kernels for all GPUs, half to three quarters "
            "as fast: the kernels for Hopper do not support the Gluon version of Triton %s (%s)",
            triton.__version__,
            error,
        )
        return False
    return True


@cache
def gpu_name(device: torch.device) -> str:
    """Name of the GPU in tuning tables."""
    return torch.cuda.get_device_properties(device).name if device.type == "cuda" else ""


@cache
def processors(device: torch.device) -> int:
    """Number of SMs."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_bytes_of(device: torch.device) -> int:
    """Maximum shared memory of a program."""
    return shared_bytes(device) if device.type == "cuda" else HOPPER_SHARED
