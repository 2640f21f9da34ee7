"""What sets the Llama-like architectures apart, as a table, and the facts in their config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import ModelSpec

HF = Mapping[str, Any]
"""config.json as it stands."""


@dataclass(frozen=True, slots=True)
class Family:
    """Differences from the plain decoder, each read from config.json."""

    qkv_bias: Callable[[HF], bool] = lambda hf: False
    o_bias: Callable[[HF], bool] = lambda hf: False
    mlp_bias: Callable[[HF], bool] = lambda hf: False
    window: Callable[[HF, int], int] = lambda hf, layer: 0
    """Attention window of a layer; 0 = full."""
    tied: bool = False
    """tie_word_embeddings where config.json does not say."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        qkv_bias=lambda hf: bool(hf.get("attention_bias")),
        o_bias=lambda hf: bool(hf.get("attention_bias")),
        mlp_bias=lambda hf: bool(hf.get("mlp_bias")),
    ),
    "MistralForCausalLM": Family(window=lambda hf, layer: hf.get("sliding_window") or 0),
}
"""By config.json's architectures[0]."""


def family_of(hf: HF, where: str) -> Family:
    """Raises ConfigError for an architecture or activation that the decoder has not."""
    architecture = (hf.get("architectures") or [None])[0]
    if architecture not in FAMILIES:
        raise ConfigError(
            f"{where}: architectures is {architecture!r}; model=llama reads {', '.join(sorted(FAMILIES))}"
        )
    if hf.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act is {hf['hidden_act']!r}; model=llama has silu")
    return FAMILIES[architecture]


def read_spec(hf: HF, where: str) -> ModelSpec:
    """`where` names the source of `hf` in errors. Defaults are those of transformers' LlamaConfig."""
    family = family_of(hf, where)
    try:
        hidden, heads, layers = hf["hidden_size"], hf["num_attention_heads"], hf["num_hidden_layers"]
        spec = ModelSpec(
            architecture=hf["architectures"][0],
            vocab=hf["vocab_size"],
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hidden // heads,
            intermediate=hf["intermediate_size"],
            max_len=hf["max_position_embeddings"],
            dtype=hf.get("dtype") or hf.get("torch_dtype") or "float32",
            eos_ids=_ids(hf.get("eos_token_id")),
            bos_id=hf.get("bos_token_id"),
            tied=hf.get("tie_word_embeddings", family.tied),
            windows=tuple(family.window(hf, layer) for layer in range(layers)),
            hf=hf,
        )
    except KeyError as missing:
        raise ConfigError(f"{where}: the key {missing} is missing") from None
    if spec.heads % spec.kv_heads:
        raise ConfigError(f"{where}: {spec.heads} query heads are no multiple of {spec.kv_heads} kv heads")
    return spec


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
