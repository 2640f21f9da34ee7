"""Reads how a checkpoint computes embeddings from the sentence-transformers files next to its weights.

Importing this module loads no torch. Nothing named in a file is ever imported or executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.core.config_json import ConfigJson
from dovetail.core.errors import ConfigError, shown
from dovetail.core.files import is_inside, parse_json
from dovetail.core.interfaces import Checkpoint, EmbeddingSpec, Pooling

_MODULES = "modules.json"
_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean"}
_FLAG, _MEAN = "pooling_mode_", "pooling_mode_mean_tokens"


def read_embedding(checkpoint: Checkpoint) -> EmbeddingSpec | None:
    """Return the embedding settings; None without modules.json, as in any but a sentence-transformers model."""
    if (text := checkpoint.text(_MODULES)) is None:
        return None
    file = checkpoint.where(_MODULES)
    modules = parse_json(text, file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{file}: not a list of modules")
    by_kind = {str(module.get("type")).rpartition(".")[2]: str(module.get("path")) for module in modules}
    if unknown := sorted(by_kind.keys() - {"Transformer", "Pooling", "Normalize"}):
        raise ConfigError(f"{file}: module type {shown(unknown[0])}; the options are Transformer, Pooling, Normalize")
    if "Pooling" not in by_kind or by_kind.get("Transformer"):
        raise ConfigError(f"{file}: needs a Pooling, and a Transformer whose path is the folder itself")
    settings = f"{by_kind['Pooling']}/config.json"
    if not is_inside(settings) or (stated := checkpoint.json(settings)) is None:
        raise ConfigError(f"{file}: {shown(by_kind['Pooling'])} is not a folder next to it with a config.json")
    return EmbeddingSpec(_pooling(stated, checkpoint.where(settings)), normalize="Normalize" in by_kind)


def _pooling(stated: Mapping[str, Any], file: str) -> Pooling:
    config = ConfigJson(stated, file)
    if config.get("pooling_mode") is not None:
        return _MODES[config.choice("pooling_mode", tuple(_MODES))]
    modes = [key for key in stated if key.startswith(_FLAG) and config.flag(key)]
    if modes == [f"{_FLAG}lasttoken"]:
        return "last"
    if modes == [_MEAN]:
        return "mean"
    found = " and ".join(map(shown, modes)) or "none"
    raise ConfigError(f"{file}: the pooling mode is {found}; the options are {_FLAG}lasttoken and {_MEAN}")
