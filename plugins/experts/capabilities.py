"""Requirements of placements that spread experts."""

from __future__ import annotations

from dovetail.core.compose import Capabilities, Host, Requires
from dovetail.plugins.experts.config import AllToAllConfig, GatherConfig, WholeConfig


def whole(config: WholeConfig, host: Host) -> Capabilities:
    return _placed("sum")


def gather(config: GatherConfig, host: Host) -> Capabilities:
    return _placed("gather")


def all_to_all(config: AllToAllConfig, host: Host) -> Capabilities:
    return _placed("all_to_all")


def _placed(exchange: str) -> Capabilities:
    """`exchange`: how rows get to their experts, for predictions."""
    return Capabilities(
        provides={"exchange": exchange},
        requires=(
            Requires(
                kind="model",
                key="expert_placement",
                allowed=(True,),
                reason="it must have routed experts, and place them (dovetail.core.layers.Experts does)",
            ),
        ),
    )
