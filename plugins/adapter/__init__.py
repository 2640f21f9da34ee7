"""Built-in adapters."""

from dovetail.core.compose import Component
from dovetail.plugins.adapter.config import LoRAConfig, NoneConfig

COMPONENTS = (
    Component(
        kind="adapter",
        name="none",
        config=NoneConfig,
        target="dovetail.plugins.adapter.none:NoAdapters",
        api="adapter/0.1",
        facts="dovetail.plugins.adapter.capabilities:none_facts",
    ),
    Component(
        kind="adapter",
        name="lora",
        config=LoRAConfig,
        target="dovetail.plugins.adapter.lora.adapters:LoRA",
        api="adapter/0.1",
        capabilities="dovetail.plugins.adapter.capabilities:lora",
        facts="dovetail.plugins.adapter.capabilities:lora_facts",
    ),
)
