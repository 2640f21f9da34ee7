"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, checked and opened lazily.

The folder is untrusted: no code in it runs, its patterns are not used as regular expressions, and shapes are checked
before a tensor is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.core.checkpoint import LazyTensor, open_safetensors
from dovetail.core.errors import ConfigError, RequestError, shown
from dovetail.core.files import path_kind, read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MOST_CONFIG_BYTES = 1 << 20
_TENSOR = re.compile(r"base_model\.model\.([\w.-]{1,500})\.lora_([AB])\.weight")
_NAME = re.compile(r"[\w.-]+")

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_UNSUPPORTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "use_dora": (bool, "DoRA scales each output by a learned magnitude"),
    "use_qalora": (bool, "QALoRA pools the inputs of quantized layers"),
    "lora_bias": (bool, "it trains biases of B"),
    "bias": (lambda v: v not in (None, "none"), "it trains biases of the base model"),
    "modules_to_save": (bool, "it replaces whole layers"),
    "trainable_token_indices": (bool, "it trains embeddings of tokens"),
    "target_parameters": (bool, "it changes parameters that are not linear layers"),
    "layer_replication": (bool, "it repeats layers of the base model"),
    "alora_invocation_tokens": (bool, "it acts on part of a sequence only (aLoRA)"),
    "init_lora_weights": (
        lambda v: isinstance(v, str) and v.lower().startswith(_CHANGES_BASE),
        "it was trained on modified base weights: save it converted to a plain LoRA "
        "(PEFT: path_initial_model_for_weight_conversion)",
    ),
}
"""Field -> (predicate of a value that enables the feature, description)."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of one matrix, whose update is scale * B @ A."""

    a: LazyTensor
    b: LazyTensor
    rank: int
    scale: float


def open_adapter(folder: Path) -> dict[str, Factors]:
    """Return the factors by checkpoint prefix, such as "model.layers.0.self_attn.q_proj". Raises RequestError if the
    adapter is not a plain LoRA."""
    try:
        return _open(folder)
    except ConfigError as error:
        raise RequestError(f"adapter: {error}") from None


def _open(folder: Path) -> dict[str, Factors]:
    config = _read_config(folder)
    if path_kind(folder / WEIGHTS) != "file":
        is_pickled = path_kind(folder / "adapter_model.bin") == "file"
        pickled = " (pickled weights would run code from the file)" if is_pickled else ""
        raise ConfigError(f"{folder} has no {WEIGHTS}; no other format is supported{pickled}")
    reader = open_safetensors(folder / WEIGHTS)
    found: dict[str, dict[str, LazyTensor]] = {}
    for name in sorted(reader.keys()):
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ConfigError(f"{folder / WEIGHTS}: tensor {shown(name)} is not part of a LoRA of a linear layer")
        found.setdefault(match[1], {})[match[2]] = reader.get_slice(name)
    if not found:
        raise ConfigError(f"{folder / WEIGHTS} has no tensors")
    _check_complete(config, found, folder)
    return {prefix: _factors(prefix, pair, config, folder) for prefix, pair in found.items()}


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    if path_kind(file) != "file":
        raise ConfigError(f"{folder} has no {CONFIG}: give a folder as PEFT's save_pretrained writes it")
    if (size := file.stat().st_size) > _MOST_CONFIG_BYTES:
        raise ConfigError(f"{file} has {size} bytes; the limit is {_MOST_CONFIG_BYTES}")
    config = read_object(file)
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{file}: peft_type is {shown(config.get('peft_type'))}, and adapter=lora serves 'LORA'")
    for field, (asks, what) in _UNSUPPORTED.items():
        if asks(config.get(field)):
            raise ConfigError(f"{file}: {field}={shown(config[field])} is not supported: {what}")
    return config


def _check_complete(config: Mapping[str, Any], found: Mapping[str, Mapping[str, LazyTensor]], folder: Path) -> None:
    """Check that each matrix has both factors and each target module has tensors."""
    for prefix, pair in found.items():
        if pair.keys() != {"A", "B"}:
            raise ConfigError(f"{folder / WEIGHTS}: {prefix} has lora_{next(iter(pair))} without its other factor")
    targets = config.get("target_modules")
    for target in targets if isinstance(targets, list) else ():
        if not any(_names(target, prefix) for prefix in found):
            raise ConfigError(f"{folder / WEIGHTS}: no tensor for {shown(target)} of target_modules")


def _factors(prefix: str, pair: Mapping[str, LazyTensor], config: Mapping[str, Any], folder: Path) -> Factors:
    a, b = pair["A"], pair["B"]
    shapes = tuple(a.get_shape()), tuple(b.get_shape())
    if len(shapes[0]) != 2 or len(shapes[1]) != 2 or shapes[0][0] != shapes[1][1]:
        raise ConfigError(
            f"{folder / WEIGHTS}: {prefix} has factors A {shown(shapes[0])} and B {shown(shapes[1])}, which do not fit"
        )
    rank = _number(config, "r", "rank_pattern", prefix, folder)
    if shapes[0][0] != rank:
        raise ConfigError(f"{folder}: {prefix} has rank {shapes[0][0]} in {WEIGHTS} and {rank:g} in {CONFIG}")
    alpha = _number(config, "lora_alpha", "alpha_pattern", prefix, folder)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Factors(a, b, int(rank), scale)


def _number(config: Mapping[str, Any], field: str, pattern: str, prefix: str, folder: Path) -> float:
    """Return a field's value for one matrix: that of the first matching pattern, or else the field's own."""
    value = config.get(field, 8)
    patterns = config.get(pattern) or {}
    if not isinstance(patterns, dict):
        raise ConfigError(f"{folder / CONFIG}: {pattern} is not an object of names and numbers")
    for name, own in patterns.items():
        if _names(name, prefix):
            value = own
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{folder / CONFIG}: {field} of {prefix} is {shown(value)}; it must be a positive number")
    return value


def _names(name: object, prefix: str) -> bool:
    """Whether `name` is the path of this matrix or the end of that path."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{CONFIG}: {shown(name)} is a pattern; modules must be named by their path or its end")
    return prefix == name or prefix.endswith(f".{name}")
