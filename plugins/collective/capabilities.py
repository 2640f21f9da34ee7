"""What the built-in collectives state about themselves."""

from __future__ import annotations

from dovetail.core.compose import Capabilities, Host
from dovetail.plugins.collective.config import NcclConfig, OrderedConfig


def nccl(config: NcclConfig, host: Host) -> Capabilities:
    """Equal bits on every rank, but which bits depends on the number of ranks, the message size and the topology."""
    return Capabilities(provides={"deterministic_sum": False, "graph_safe": True})


def ordered(config: OrderedConfig, host: Host) -> Capabilities:
    return Capabilities(provides={"deterministic_sum": True, "graph_safe": True})
