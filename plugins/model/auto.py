"""model=auto: the native model that has the checkpoint's architecture, or else model=transformers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.compose.choice import Reader
from dovetail.core.errors import ConfigError
from dovetail.plugins.model.config import AutoConfig

FALLBACK = "transformers"


def choose(config: AutoConfig, facts: Any, readers: Mapping[str, Reader]) -> str:
    """Return the name of the model. `readers`: models that state which architectures they have."""
    hf = open_checkpoint(config.path).config() if config.hf is None else config.hf
    found = [name for name, reads in readers.items() if reads(hf)]
    if len(found) > 1:
        options = " or ".join(f"model={name}" for name in found)
        raise ConfigError(f"config.json: several models have its architecture: set {options}")
    return found[0] if found else FALLBACK
