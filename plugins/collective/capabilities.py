"""Capabilities of the built-in collectives."""

from __future__ import annotations

from dovetail.core.compose import Capabilities, Host, Requires
from dovetail.plugins.collective.config import NcclConfig, OrderedConfig, SymmMemConfig


def nccl(config: NcclConfig, host: Host) -> Capabilities:
    """The bits are equal on every rank, but depend on the number of ranks, the message size and the topology."""
    return Capabilities(provides={"deterministic_sum": False, "graph_safe": True})


def ordered(config: OrderedConfig, host: Host) -> Capabilities:
    return Capabilities(provides={"deterministic_sum": True, "graph_safe": True})


def symm_mem(config: SymmMemConfig, host: Host) -> Capabilities:
    """Kernels sum in rank order in float32. Large messages and other dtypes go to NCCL."""
    reason = "its kernels write into the memory of other GPUs"
    return Capabilities(
        provides={"deterministic_sum": False, "graph_safe": True},
        requires=(
            Requires(kind="host", key="device", allowed=("cuda",), reason=reason),
            Requires(kind="engine", key="device", allowed=("auto", "cuda"), reason=reason),
        ),
    )
