"""Parts that parsers of quantization_config share: layers left in the model's dtype, errors. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from dovetail.core.errors import TextError, shown

_PATTERN = re.compile(r"[\w.\\*^$|()-]{1,200}")
"""Characters allowed in "re:" entries: enough to match layer names."""
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
"""Refused, since matching may take exponential time."""
_MOST_STARS = 4
"""Stars in a pattern. The time of matching grows with the length of a name to this power."""


def stored_config(hf: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return quantization_config; None = the weights are plain. Raise TextError if it is no object."""
    config = hf.get("quantization_config")
    if config is not None and not isinstance(config, Mapping):
        raise wrong("", config, "it must be an object")
    return config


def read_ignored(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the names of layers at `key` of a quantization_config: checkpoint names, or "re:" and a pattern that
    matches from the start."""
    names = config.get(key)
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise wrong(key, names, "it must be a list of names")
    for name in names:
        pattern = name.removeprefix("re:")
        if pattern != name and (not _PATTERN.fullmatch(pattern) or _REPEATED_GROUP.search(pattern)):
            raise wrong(key, name, "patterns may have letters, digits, dots, stars and groups that are not repeated")
        if name.count("*") > _MOST_STARS:
            raise wrong(key, name, f"a pattern may have {_MOST_STARS} stars; write several patterns")
    return tuple(names)


Way = Literal["names", "modules", "substrings", "wildcards"]
"""How entries match: as a name or "re:" pattern, as in transformers 5, as a part of it, or with the wildcard *."""


def skips(ignored: tuple[str, ...], names: tuple[str, ...], path: str, way: Way = "names") -> bool:
    """Whether the layer merged from these matrices is plain. Raise TextError if only some of them are."""
    match = WAYS[way]
    plain = [any(match(name, entry) for entry in ignored) for name in names]
    if any(plain) and not all(plain):
        some = ", ".join(name for name, skipped in zip(names, plain, strict=True) if skipped)
        raise TextError(
            "config.json",
            f"quantization_config leaves {some} unquantized, but not the other matrices of {path}, with which it is "
            "merged into one matmul",
        )
    return any(plain)


def _matches(name: str, entry: str) -> bool:
    if not entry.startswith("re:"):
        return name == entry
    try:
        return re.match(entry.removeprefix("re:"), name) is not None
    except re.error as error:
        raise wrong("ignore", entry, f"it is not a pattern: {error}") from None


def _in_module(name: str, entry: str) -> bool:
    """Whether an entry has whole words of the name, or its end, or is a pattern for its beginning up to a dot."""
    if (words := entry.strip(".")) and (f".{words}." in f".{name}." or name.endswith(entry)):
        return True
    if not _SPECIAL.search(entry) or not _PATTERN.fullmatch(entry) or _REPEATED_GROUP.search(entry):
        return False
    try:
        return re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", name) is not None
    except re.error:
        return False


_SPECIAL = re.compile(r"[\\*^$|()]")
"""Characters that names do not have."""
WAYS: dict[Way, Callable[[str, str], bool]] = {
    "names": _matches,
    "modules": _in_module,
    "substrings": lambda name, entry: entry in name,
    # ModelOpt lists modules; their children are excluded, too.
    "wildcards": lambda name, entry: fnmatchcase(name, entry) or fnmatchcase(name, f"{entry}.*"),
}


def modelopt(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of ModelOpt's config that describes the weights: hf_quant_config.json nests it."""
    nested = config.get("quantization")
    return nested if isinstance(nested, Mapping) else config


def kv_scale_names(config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the names of the scales of K and V below an attention layer's prefix; () = the checkpoint has none."""
    if config is None:
        return ()
    method, scheme = config.get("quant_method"), config.get("kv_cache_scheme")
    if method == "modelopt":
        kept = modelopt(config).get("kv_cache_quant_algo")
        if kept not in (None, "FP8"):
            raise wrong("kv_cache_quant_algo", kept, "there are null, FP8")
        if scheme is not None:
            _eight_bit_floats(scheme)
        return () if kept is None and scheme is None else ("k_proj.k_scale", "v_proj.v_scale")
    if scheme is None:
        return ()
    if method == "compressed-tensors":
        _eight_bit_floats(scheme)
        if (strategy := scheme.get("strategy")) not in ("tensor", "attn_head"):
            raise wrong("kv_cache_scheme.strategy", strategy, "there are tensor, attn_head")
    elif method != "fp8" or scheme != "static":
        raise wrong("kv_cache_scheme", scheme, "there are null, static")
    return "k_scale", "v_scale"


def _eight_bit_floats(scheme: object) -> None:
    wanted = {"num_bits": 8, "type": "float"}
    if not isinstance(scheme, Mapping) or any(scheme.get(key) != value for key, value in wanted.items()):
        raise wrong("kv_cache_scheme", scheme, "it must have num_bits 8 and type float")
    if scheme.get("symmetric", True) is not True:
        raise wrong("kv_cache_scheme.symmetric", scheme["symmetric"], "there is true")


def wrong(key: str, value: object, reason: str) -> TextError:
    """Return the error for a value of quantization_config."""
    where = "quantization_config" + (f".{key}" if key else "")
    return TextError("config.json", f"{where} is {shown(value)}: {reason}")


def one_of(config: Mapping[str, Any], key: str, options: tuple[Any, ...], default: Any = None, below: str = "") -> Any:
    """Return the value at `key`. Raise TextError unless it is one of `options`. `below`: name of `config`."""
    value = config.get(key, default)
    if not any(value is option or (value == option and type(value) is type(option)) for option in options):
        word = "is" if len(options) == 1 else "are"
        name = f"{below}.{key}" if below else key
        raise wrong(name, value, f"there {word} {', '.join(map(str, options))}")
    return value
