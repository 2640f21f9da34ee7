"""Options of the built-in adapters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.core.compose import Config


class NoneConfig(Config):
    """The base model alone."""


class LoRAConfig(Config):
    """Low-rank adapters (Hu et al. 2021) of every linear layer, in PEFT's layout, several of them in one step."""

    load: dict[str, str] = Field(default_factory=dict)
    """Adapters to load at start-up: name -> folder with adapter_config.json and adapter_model.safetensors."""
    slots: int = Field(4, ge=1, le=64)
    """Different adapters in one step at most. Others that are loaded wait in host memory for a slot."""
    max_rank: Literal[16, 32, 64] = 16
    """Greatest rank of an adapter. Memory of a slot is taken for it: rank x (inputs + outputs) of each layer's
    matrices."""
    max_loaded: int = Field(64, ge=1)
    """Adapters in host memory at most; each takes there what a slot takes on the device."""

    def numbers(self, inputs: int, outputs: int) -> int:
        """Of both factors of one matrix."""
        return self.max_rank * (inputs + outputs)
