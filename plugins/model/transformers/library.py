"""The decoder class of transformers for a config.json, built on the meta device.

The file is untrusted: no code that it names is imported, and its sizes are bounded before anything is built.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dovetail.core.config_json import ConfigJson
from dovetail.core.errors import ConfigError, shown
from dovetail.plugins.model.llama.families import FAMILIES, MOST

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

NATIVE = f"Native families (model=llama): {', '.join(FAMILIES)}"
"""End of messages about models that cannot run."""

_UNREAD = {
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
    "quantization_config",
    "output_attentions",
    "output_hidden_states",
}
"""Keys that the library does not get: they choose implementations, possibly code from a hub, or are the quantizer's."""

_BOUNDED = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "vocab_size": "vocab",
    "num_attention_heads": "heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate",
    "max_position_embeddings": "positions",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
}
"""Attribute of a config of transformers -> key of MOST."""


_LAYER_TYPES = {"full_attention", "sliding_attention"}

_NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads")
"""Sizes for which a default of the library would be another model."""


@dataclass(frozen=True)
class Library:
    """A model of transformers, not built."""

    config: PretrainedConfig
    model: type[PreTrainedModel]
    where: str
    """Source of the config.json, for messages."""

    def build(self, attention: str, dtype: torch.dtype) -> PreTrainedModel:
        """Return the model on the meta device. `attention`: a name that is registered with AttentionInterface."""
        with torch.device("meta"):
            try:
                model = self.model._from_config(copy.deepcopy(self.config), dtype=dtype, attn_implementation=attention)
            except Exception as error:  # A config can break the library's code anywhere.
                raise self.refused(f"transformers cannot build it: {error_text(error)}") from error
        model.requires_grad_(False)
        return model.eval()

    def refused(self, why: str) -> ConfigError:
        return refusal(self.where, self.model.__name__, why)


def refusal(where: str, architecture: str, why: str) -> ConfigError:
    return ConfigError(f"{where}: model=transformers does not run {architecture}: {why}. {NATIVE}")


def read_library(hf: Mapping[str, Any], where: str) -> Library:
    """Return the library's class for a config.json. Raises ConfigError for what the library or this engine lacks."""
    raw = ConfigJson(hf, where)
    _refuse_remote_code(raw)
    stated = raw.get("architectures")
    architecture = stated[0] if isinstance(stated, list) and stated and isinstance(stated[0], str) else None
    if architecture is None:
        raise raw.wrong("architectures", "it must be a list with the name of a class of transformers")
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise raw.wrong("model_type", f"transformers {transformers.__version__} does not know it. {NATIVE}")
    expected = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    # The library runs some types with the class of another one, whose tensors it renames (EXAONE 3 with Llama's).
    own = f"{re.sub('[-_]', '', kind)}ForCausalLM".lower()
    if architecture != expected and (expected is None or architecture.lower() != own):
        if expected is None:
            raise refusal(where, shown(architecture), f"model_type {kind} is no decoder of text")
        raise ConfigError(
            f"{where}: architectures names {shown(architecture)}, and the decoder of model_type {kind} is {expected}: "
            "correct the key that is wrong"
        )
    _check_bounds(raw, CONFIG_MAPPING[kind].attribute_map)
    try:
        config = CONFIG_MAPPING[kind].from_dict({key: _floats(hf[key]) for key in hf if key not in _UNREAD})
    except Exception as error:  # Its validation raises errors of several libraries.
        raise refusal(where, architecture, f"transformers refuses the file: {error_text(error)}") from error
    found = Library(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], where)
    if config.get_text_config() is not config:
        raise found.refused("it has a decoder besides other models (text_config), for images or sound")
    if getattr(config, "is_encoder_decoder", False):
        raise found.refused("it has an encoder and cross attention")
    kinds = set(getattr(config, "layer_types", None) or ())
    # A hybrid class may have no such layers (Granite 4.0 Micro, 2025).
    if getattr(found.model, "_is_stateful", False) and not (kinds and kinds <= _LAYER_TYPES):
        raise found.refused("its layers keep a recurrent state (state-space or hybrid); the cache holds K and V")
    if not found.model._supports_attention_backend:
        raise found.refused("its class in transformers does not let attention be replaced")
    if others := sorted(kinds - _LAYER_TYPES):
        raise found.refused(f"it has layers of the type {', '.join(map(shown, others))}")
    _check_sizes(raw, config)
    return found


def _floats(value: Any) -> Any:
    """Return a value of config.json with the numbers that JSON lacks, such as infinity, which the library writes as
    {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        tag = value.get("__float__") if len(value) == 1 else None
        return _FLOATS[tag] if tag in _FLOATS else {key: _floats(each) for key, each in value.items()}
    return [_floats(each) for each in value] if isinstance(value, list) else value


_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _check_bounds(raw: ConfigJson, names: Mapping[str, str]) -> None:
    """Check upper limits before the library reads the file: its configs make lists of num_hidden_layers entries.
    `names`: other names of the keys."""
    for key, most in _BOUNDED.items():
        for name in {key, names.get(key, key)}:
            if isinstance(raw.get(name), int) and raw.get(name) > MOST[most]:
                raw.count(name, at_least=1 if key in _NEEDED else 0, at_most=MOST[most])
    for key, value in raw.values.items():
        if isinstance(value, Mapping):
            _check_bounds(raw.section(key), names)


def _check_sizes(raw: ConfigJson, config: PretrainedConfig) -> None:
    for key, most in _BOUNDED.items():
        name = key if key in raw.values else config.attribute_map.get(key, key)
        if key in _NEEDED or isinstance(raw.get(name), int):
            raw.count(name, at_least=1 if key in _NEEDED else 0, at_most=MOST[most])


def _refuse_remote_code(raw: ConfigJson) -> None:
    named = raw.get("auto_map")
    if named is None:
        return
    values = list(named.values()) if isinstance(named, Mapping) else [named]
    files = sorted({f"{value.rpartition('--')[2].partition('.')[0]}.py" for value in values if isinstance(value, str)})
    listed = " and ".join(shown(file) for file in files[:4]) or "files that it does not name"
    raise ConfigError(
        f"{raw.where}: auto_map asks for code of the model folder, {listed}, and such code is never run. If the model "
        "does not differ from a class of transformers, remove auto_map from the file"
    )


def error_text(error: Exception) -> str:
    """Return an error of the library on one line."""
    return shown(" ".join(f"{type(error).__name__}: {error}".split()), 300)
