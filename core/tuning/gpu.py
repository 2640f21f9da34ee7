"""Facts about a GPU that bound the candidates of a search and the prediction of their times."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.ops.tiles import HOPPER_SHARED

FLOPS_PER_CYCLE = {(8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192, (12, 0): 1024}
"""16-bit operations of the tensor cores of an SM per clock cycle, by compute capability: the rate of dense matrices in
NVIDIA's data sheets over SMs and boost clock."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str = "NVIDIA H200"
    processors: int = 132
    """Streaming multiprocessors (SMs)."""
    bandwidth: float = 4.8e12
    """Theoretical memory bandwidth, bytes per second."""
    clock: float = 1.98e9
    """Maximum clock of the SMs, Hz."""
    shared: int = HOPPER_SHARED
    """Shared memory of a program, bytes."""
    tma: bool = True
    """Whether it has a tensor memory accelerator."""
    hopper: bool = True
    """Whether the matmul kernels for Hopper run."""
    flops_per_cycle: int = FLOPS_PER_CYCLE[9, 0]
    """16-bit operations of an SM per clock cycle; 8-bit ones take half the time."""


def this_gpu() -> Gpu:
    """Return the facts of the current GPU."""
    import torch

    from dovetail.core.ops.matmul import device_facts

    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    name, processors, hopper, shared = device_facts(torch.device("cuda", index))
    # Both rates are in kHz; double data rate. Some versions of PyTorch lack them.
    memory = 2e3 * getattr(properties, "memory_clock_rate", 0) * getattr(properties, "memory_bus_width", 0) / 8
    clock = 1e3 * getattr(properties, "clock_rate", 0)
    default = Gpu()
    return Gpu(
        name,
        processors,
        memory or default.bandwidth,
        clock or default.clock,
        shared,
        (properties.major, properties.minor) >= (9, 0),
        hopper,
        FLOPS_PER_CYCLE.get((properties.major, properties.minor), default.flops_per_cycle),
    )
