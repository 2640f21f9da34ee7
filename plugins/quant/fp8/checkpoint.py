"""What a checkpoint's `quantization_config` says about weights in FP8. Imports no torch.

Read: "compressed-tensors" with format "float-quantized" (weights by tensor or by output channel) and "fp8" (by tensor).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.core.errors import ConfigError

READS = 'quant=fp8 reads compressed-tensors with format "float-quantized", and fp8 without blocks'
KV_TENSORS = ("k_scale", "v_scale")
_PATTERN = re.compile(r"[\w.\\*^$|()-]{1,200}")
"""Of "re:" entries: what names of layers need."""
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
"""Can take a matcher for ever."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint whose linear layers are in E4M3, with a `weight_scale` beside each weight."""

    input_scales: bool = False
    """Whether layers have an `input_scale` too."""
    kv_scales: bool = False
    """Whether attention layers have a k_scale and a v_scale."""
    ignored: tuple[str, ...] = ()
    """Layers left in the model's dtype: checkpoint names, or "re:" and a pattern from a name's beginning."""

    def skips(self, names: tuple[str, ...], path: str) -> bool:
        """Whether the layer made of these matrices is plain. ConfigError where some are and some are not."""
        plain = [any(_matches(name, entry) for entry in self.ignored) for name in names]
        if any(plain) and not all(plain):
            some = ", ".join(name for name, skipped in zip(names, plain, strict=True) if skipped)
            raise ConfigError(
                f"config.json: quantization_config leaves {some} unquantized, but not the other matrices of {path}, "
                "with which it is one product here"
            )
        return any(plain)


def read_stored(hf: Mapping[str, Any]) -> Stored | None:
    """None: the weights are plain. ConfigError for what cannot be read, naming it."""
    said = hf.get("quantization_config")
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise _wrong("", said, "it must be an object")
    method = said.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(said)
    if method == "fp8":
        return _fp8(said)
    raise _wrong("quant_method", method, READS)


def _compressed_tensors(said: Mapping[str, Any]) -> Stored:
    if (form := said.get("format")) != "float-quantized":
        raise _wrong("format", form, READS)
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _wrong("config_groups", groups, "one group for all linear layers is read")
    (group,) = groups.values()
    if not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        raise _wrong("config_groups", groups, 'its targets must be ["Linear"]')
    _eight_bits(group, "weights", ("tensor", "channel"))
    inputs = _eight_bits(group, "input_activations", ("tensor", "token"))
    scheme = said.get("kv_cache_scheme")
    if scheme is not None:
        _eight_bits(said, "kv_cache_scheme", ("tensor", "attn_head"))
    return Stored(inputs.get("dynamic") is not True, scheme is not None, _names(said, "ignore"))


def _fp8(said: Mapping[str, Any]) -> Stored:
    if (block := said.get("weight_block_size")) is not None:
        raise _wrong("weight_block_size", block, "scales of blocks are not supported, one scale a matrix is")
    scheme = said.get("activation_scheme")
    if scheme not in ("static", "dynamic"):
        raise _wrong("activation_scheme", scheme, "there are static, dynamic")
    kv = said.get("kv_cache_scheme")
    if kv not in (None, "static"):
        raise _wrong("kv_cache_scheme", kv, "there are null, static")
    return Stored(scheme == "static", kv == "static", _names(said, "ignored_layers"))


def _eight_bits(of: Mapping[str, Any], key: str, strategies: tuple[str, ...]) -> Mapping[str, Any]:
    scheme = of.get(key)
    if not isinstance(scheme, Mapping):
        raise _wrong(key, scheme, "weights and activations in 8 bits are read, no others")
    wanted = {"num_bits": (8,), "type": ("float",), "strategy": strategies, "symmetric": (True,)}
    for name, options in wanted.items():
        value = scheme.get(name, True if name == "symmetric" else None)
        if value not in options:
            raise _wrong(f"{key}.{name}", value, f"there are {', '.join(map(str, options))}")
    return scheme


def _names(said: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = said.get(key)
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _wrong(key, names, "it must be a list of names")
    for name in names:
        pattern = name.removeprefix("re:")
        if pattern != name and (not _PATTERN.fullmatch(pattern) or _REPEATED_GROUP.search(pattern)):
            raise _wrong(key, name, "patterns have letters, digits, dots, stars and groups that are not repeated")
    return tuple(names)


def _matches(name: str, entry: str) -> bool:
    if not entry.startswith("re:"):
        return name == entry
    try:
        return re.match(entry.removeprefix("re:"), name) is not None
    except re.error as error:
        raise _wrong("ignore", entry, f"it is no pattern: {error}") from None


def _wrong(key: str, value: object, reason: str) -> ConfigError:
    where = "quantization_config" + (f".{key}" if key else "")
    shown = repr(value)
    return ConfigError(f"config.json: {where} is {shown[:200]}{'...' if len(shown) > 200 else ''}: {reason}")
