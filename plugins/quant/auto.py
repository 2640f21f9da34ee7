"""quant=auto: the quantizer that reads the checkpoint, chosen by its config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from dovetail.core.checkpoint import located, open_checkpoint
from dovetail.core.compose.choice import Reader
from dovetail.core.errors import TextError, shown
from dovetail.plugins.quant.config import AutoConfig


def choose(config: AutoConfig, spec: Any, readers: Mapping[str, Reader]) -> str:
    """Return the name of the quantizer. `spec`: ModelSpec of the model; None if it states none."""
    path = getattr(spec, "checkpoint", None)
    with nullcontext() if path is None else located(open_checkpoint(path)):
        return reader_of(getattr(spec, "hf", None) or {}, readers)


def reader_of(hf: Mapping[str, Any], readers: Mapping[str, Reader]) -> str:
    """Return the name of the quantizer that reads a checkpoint with this config.json."""
    stored = hf.get("quantization_config")
    if stored is None:
        return "none"
    found = [name for name, reads in readers.items() if reads(hf)]
    if len(found) == 1:
        return found[0]
    method = stored.get("quant_method") if isinstance(stored, Mapping) else stored
    form = ""
    if isinstance(stored, Mapping) and "format" in stored:
        form = f", format {shown(stored['format'])}"
    elif isinstance(stored, Mapping) and len(stored) > 1:
        form = f" with {shown({key: value for key, value in stored.items() if key != 'quant_method'}, 160)}"
    if found:
        options = " or ".join(f"quant={name}" for name in found)
        raise TextError("config.json", f"several quantizers read quant_method {shown(method)}{form}: set {options}")
    raise TextError(
        "config.json",
        f"no installed quantizer reads quant_method {shown(method)}{form}. Those that read quantized checkpoints: "
        f"{', '.join(f'quant={name}' for name in readers)}",
    )
