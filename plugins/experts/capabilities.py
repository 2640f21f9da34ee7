"""Requirements of placements that spread experts."""

from __future__ import annotations

from dovetail.core.compose import Capabilities, Config, Host, Requires


def placed(config: Config, host: Host) -> Capabilities:
    return Capabilities(
        requires=(
            Requires(
                kind="model",
                key="expert_placement",
                allowed=(True,),
                reason="it must have routed experts, and place them (dovetail.core.layers.Experts does)",
            ),
        )
    )
