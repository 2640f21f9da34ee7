"""Requirements of the built-in adapters, and the memory they use."""

from __future__ import annotations

from dovetail.core.compose import Capabilities, Host, Requires
from dovetail.core.interfaces import AdapterFacts
from dovetail.plugins.adapter.config import LoRAConfig, NoneConfig


def none_facts(config: NoneConfig) -> AdapterFacts:
    return AdapterFacts(0, lambda inputs, outputs: 0)


def lora_facts(config: LoRAConfig) -> AdapterFacts:
    return AdapterFacts(config.slots, config.numbers)


def lora(config: LoRAConfig, host: Host) -> Capabilities:
    return Capabilities(
        requires=(
            Requires(
                kind="model",
                key="adapters",
                allowed=(True,),
                reason="its layers must pass every linear output to the adapters (dovetail.core.layers.Linear does)",
            ),
            Requires(
                kind="executor",
                key="adapters",
                allowed=(True,),
                reason="each rank reads adapters while it runs",
            ),
        )
    )
