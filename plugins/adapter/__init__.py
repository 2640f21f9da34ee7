"""Built-in adapters."""

from dovetail.plugins import builtin
from dovetail.plugins.adapter.config import LoRAConfig, NoneConfig

COMPONENTS = (
    builtin("adapter", "none", NoneConfig, "none:NoAdapters", facts="capabilities:none_facts"),
    builtin(
        "adapter",
        "lora",
        LoRAConfig,
        "lora.adapters:LoRA",
        capabilities="capabilities:lora",
        facts="capabilities:lora_facts",
    ),
)
