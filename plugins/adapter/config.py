"""Options of the built-in adapters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.core.compose import Config


class NoneConfig(Config):
    """The base model alone."""


class LoRAConfig(Config):
    """Low-rank adapters (Hu et al. 2021) for every linear layer, in PEFT's layout, several of them in one step."""

    load: dict[str, str] = Field(default_factory=dict)
    """Adapters to load at start-up: name -> folder with adapter_config.json and adapter_model.safetensors."""
    slots: int = Field(4, ge=1, le=64)
    """Most different adapters in one step. Other loaded adapters wait in host memory for a slot."""
    max_rank: Literal[16, 32, 64] = 16
    """Greatest rank of an adapter. It sets the size of a slot: rank x (inputs + outputs) numbers for each matrix."""
    max_loaded: int = Field(64, ge=1)
    """Most adapters in host memory; each has the size of a slot."""

    def numbers(self, inputs: int, outputs: int) -> int:
        """Return the size of both factors of one matrix, in numbers."""
        return self.max_rank * (inputs + outputs)
