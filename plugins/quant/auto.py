"""quant=auto: the quantizer that reads the checkpoint, chosen by its config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.core.compose.choice import Reader
from dovetail.core.errors import ConfigError, shown
from dovetail.plugins.quant.config import AutoConfig


def choose(config: AutoConfig, spec: Any, readers: Mapping[str, Reader]) -> str:
    """Return the name of the quantizer. `spec`: ModelSpec of the model; None if it states none."""
    hf = getattr(spec, "hf", None) or {}
    stored = hf.get("quantization_config")
    if stored is None:
        return "none"
    found = [name for name, reads in readers.items() if reads(hf)]
    if len(found) == 1:
        return found[0]
    method = stored.get("quant_method") if isinstance(stored, Mapping) else stored
    form = f", format {shown(stored['format'])}" if isinstance(stored, Mapping) and "format" in stored else ""
    if found:
        options = " or ".join(f"quant={name}" for name in found)
        raise ConfigError(f"config.json: several quantizers read quant_method {shown(method)}{form}: set {options}")
    raise ConfigError(
        f"config.json: no installed quantizer reads quant_method {shown(method)}{form}. Those that read quantized "
        f"checkpoints: {', '.join(f'quant={name}' for name in readers)}"
    )
