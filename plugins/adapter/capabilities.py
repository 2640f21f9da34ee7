"""What the built-in adapters demand of a composition."""

from __future__ import annotations

from dovetail.core.compose import Capabilities, Host, Requires
from dovetail.plugins.adapter.config import LoRAConfig


def lora(config: LoRAConfig, host: Host) -> Capabilities:
    return Capabilities(
        requires=(
            Requires(
                kind="model",
                key="adapters",
                allowed=(True,),
                reason="its layers must hand every linear product to the adapters (dovetail.core.layers.Linear does)",
            ),
            Requires(
                kind="executor",
                key="adapters",
                allowed=(True,),
                reason="each rank reads adapters while it runs",
            ),
        )
    )
