"""Makes config.json and the tokenizer's files of a GGUF file's metadata.

llama.cpp has one `general.architecture` for models that compute alike. Settings that change what a model computes and
that are not translated here are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.core.errors import ConfigError, shown

META = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Differences between the values of `general.architecture`."""

    name: str
    """Entry of `architectures` in config.json."""
    model_type: str
    permuted: bool = False
    """Whether the rows of q and k have pairs of rotary positions side by side, as llama.cpp stores Llama models."""


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
}
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Key below the architecture's name -> key of config.json."""
_REFUSED = ("expert_count", "attention.sliding_window", "attention.scale", "logit_scale")
_SCALING = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
"""Key below rope.scaling -> key of rope_parameters."""
_TRAINED, _LOW, _HIGH = 8192, 1.0, 4.0
"""Settings of Llama 3.1's scaling of rotary positions, of which a GGUF file has the resulting factors alone."""
_LEADING_BOS = ("llama3", "llama-v3", "llama-bpe")
"""Values of tokenizer.ggml.pre for which llama.cpp puts BOS first, and takes whole words before merges."""
_PLAIN_SPLIT = ("default", "gpt-2")
"""Values of tokenizer.ggml.pre that stand for GPT-2's split of a text, which ByteLevel has."""


def read_architecture(metadata: META, where: str) -> Architecture:
    stated = metadata.get("general.architecture")
    if stated not in ARCHITECTURES:
        raise ConfigError(
            f"{where}: general.architecture is {shown(stated)}; GGUF files are read for {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[stated]


def make_config(
    metadata: META,
    names: Sequence[str],
    vocab: int,
    dtype: str,
    blocks: Sequence[str],
    factors: Sequence[float],
    where: str,
) -> str:
    """Return config.json. `names`: Hugging Face names of the tensors; `blocks`: types of those in blocks; `factors`: by
    which the frequencies of rotary positions are divided, () = by none."""
    architecture, prefix = read_architecture(metadata, where), metadata["general.architecture"]
    for key in _REFUSED:
        if metadata.get(f"{prefix}.{key}"):
            raise ConfigError(
                f"{where}: {prefix}.{key} is {shown(metadata[f'{prefix}.{key}'])}, which is not supported"
            )
    config = {ours: metadata[f"{prefix}.{key}"] for key, ours in _KEYS.items() if f"{prefix}.{key}" in metadata}
    present = set(names)
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return json.dumps(
        {
            "architectures": [architecture.name],
            "model_type": architecture.model_type,
            "vocab_size": vocab,
            "tie_word_embeddings": "lm_head.weight" not in present,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in present,
            "mlp_bias": "model.layers.0.mlp.down_proj.bias" in present,
            "rope_parameters": _rope(metadata, prefix, factors, where),
            "dtype": dtype,
            "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)) or None,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            **config,
            **({"quantization_config": {"quant_method": "gguf", "types": list(blocks)}} if blocks else {}),
        }
    )


def _rope(metadata: META, prefix: str, factors: Sequence[float], where: str) -> dict[str, Any]:
    theta = metadata.get(f"{prefix}.rope.freq_base", 10000.0)
    heads, key = metadata.get(f"{prefix}.attention.head_count"), f"{prefix}.rope.dimension_count"
    width = metadata.get(f"{prefix}.attention.key_length") or metadata.get(f"{prefix}.embedding_length", 0) // (
        heads or 1
    )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if (dim := metadata.get(key, width)) != width:
        rope["partial_rotary_factor"] = dim / width
    kind = metadata.get(f"{prefix}.rope.scaling.type", "none")
    if factors:
        expected = _llama3_factors(theta, dim, max(factors))
        if kind not in ("none", "linear") or len(factors) != len(expected) or not _close(factors, expected):
            raise ConfigError(f"{where}: rope_freqs.weight has factors that are not those of Llama 3.1 and 3.2")
        bounds = {"low_freq_factor": _LOW, "high_freq_factor": _HIGH, "original_max_position_embeddings": _TRAINED}
        return {**rope, "rope_type": "llama3", "factor": max(factors), **bounds}
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{where}: {prefix}.rope.scaling.type is {shown(kind)}; there are none, linear, yarn")
    section = f"{prefix}.rope.scaling."
    stated = {key.removeprefix(section): value for key, value in metadata.items() if key.startswith(section)}
    if unknown := sorted(stated.keys() - {"type", "finetuned", *_SCALING}):
        raise ConfigError(f"{where}: {section}{unknown[0]} is {shown(stated[unknown[0]])}, which is not supported")
    return {**rope, "rope_type": kind, **{ours: stated[key] for key, ours in _SCALING.items() if key in stated}}


def _llama3_factors(theta: float, dim: int, factor: float) -> list[float]:
    """Factors that llama.cpp's converter computes of Llama 3.1's settings."""
    found = []
    for pair in range(dim // 2):
        rotations = _TRAINED / (2 * math.pi * theta ** (2 * pair / dim))
        kept = min(max((rotations - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        found.append(1 / ((1 - kept) / factor + kept))
    return found


def _close(left: Sequence[float], right: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(left, right, strict=True))


def make_tokenizer_config(metadata: META) -> str:
    """Return tokenizer_config.json: special tokens, and the chat template."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    special = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {ours: metadata.get(f"tokenizer.ggml.{name}_token_id") for ours, name in special.items()}
    named = {ours: tokens[id] for ours, id in ids.items() if id is not None and id < len(tokens)}
    template = metadata.get("tokenizer.chat_template")
    return json.dumps({**named, **({} if template is None else {"chat_template": template})})


def make_tokenizer(metadata: META, where: str) -> str:
    """Return tokenizer.json, made by transformers. Raises ConfigError for a file without a known one."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or model in (None, "none", "no_vocab"):
        raise ConfigError(f"{where}: no tokenizer (tokenizer.ggml.model is {shown(model)}). Choose a file that has one")
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

        splits, stated = mapping.GGUF_PRE_TOKENIZER_SPLITS, mapping.GGUF_TOKENIZER_MAPPING["tokenizer"]
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"GGUF tokenizers need transformers 5.24 ({error}): pip install 'dovetail[gguf]'") from None
    if model == "gpt2" and pre not in (*_PLAIN_SPLIT, *splits):
        raise ConfigError(f"{where}: tokenizer.ggml.pre is {shown(pre)}, and transformers does not have its rules")
    described = {ours: metadata[f"tokenizer.{key}"] for key, ours in stated.items() if f"tokenizer.{key}" in metadata}
    try:
        backend, _ = mapping.convert_gguf_tokenizer(metadata["general.architecture"], described)
        made = json.loads(backend.to_str())
    except Exception as error:  # The converter and the library raise exceptions of any type.
        raise ConfigError(f"{where}: transformers cannot read its tokenizer ({shown(error)})") from None
    if model == "gpt2" and pre in _LEADING_BOS:
        made["model"]["ignore_merges"] = True
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    leads = metadata.get("tokenizer.ggml.add_bos_token", model == "llama" or pre in _LEADING_BOS)
    made["post_processor"] = _leading(tokens[bos], bos) if leads and bos is not None and bos < len(tokens) else None
    return json.dumps(made, ensure_ascii=False)


def _leading(token: str, id: int) -> dict[str, Any]:
    """Post-processor of tokenizer.json that puts a token first."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"A": {"Sequence": {"id": "A", "type_id": 0}}, "B": {"Sequence": {"id": "B", "type_id": 1}}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text["A"]],
        "pair": [first, text["A"], text["B"]],
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    }
