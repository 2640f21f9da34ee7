"""Writes GGUF files as llama.cpp's converter does, with the package gguf."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from . import k_quants

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def small_tensors(config: Mapping[str, Any] = SMALL, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random tensors of a Llama model, with a head."""
    draw = torch.Generator().manual_seed(seed)
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["hidden_size"]
    kv = width // config["num_attention_heads"] * config["num_key_value_heads"]
    rows = {"self_attn.q_proj": width, "self_attn.k_proj": kv, "self_attn.v_proj": kv, "self_attn.o_proj": hidden}
    shapes = {name: (size, hidden) for name, size in (rows | {"mlp.gate_proj": inner, "mlp.up_proj": inner}).items()}
    shapes |= {"mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    shapes = {f"model.layers.0.{name}": shape for name, shape in shapes.items()}
    shapes |= dict.fromkeys(("model.embed_tokens", "lm_head"), (config["vocab_size"], hidden))
    shapes["model.norm"] = (hidden,)
    return {f"{name}.weight": torch.randn(shape, generator=draw) / 8 for name, shape in shapes.items()}


def byte_tokenizer() -> dict[str, Any]:
    """Return a tokenizer.json of single bytes, a BOS token and some merges."""
    from tokenizers import pre_tokenizers

    letters = ["<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", "de"]
    vocab = {letter: number for number, letter in enumerate(letters)}
    merges = [["a", "b"], ["ab", "c"], ["d", "e"]]
    return {"model": {"vocab": vocab, "merges": merges}, "added_tokens": [{"id": 0, "content": "<bos>"}]}


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """Return the bytes of a matrix in a GGUF type."""
    if kind in k_quants.ENCODERS:
        return k_quants.encode(values, kind)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])


def write_gguf(
    path: Path,
    config: Mapping[str, Any] = SMALL,
    tensors: Mapping[str, torch.Tensor] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    types: Mapping[str, str] | None = None,
    extra: Mapping[str, torch.Tensor] | None = None,
    *,
    architecture: str | None = None,
    split: int = 0,
    encode: Callable[[np.ndarray, str], np.ndarray] = encode,
    **metadata: Any,
) -> Path:
    """`types`: GGUF type by the name of a matrix; others keep their dtype, and vectors are in F32. `extra`: tensors by
    their GGUF name. `split`: tensors of a file. `encode`: makes
    the bytes of a matrix in the file's order of rows. `metadata`: further keys below the architecture's name."""
    tensors = small_tensors(config) if tensors is None else tensors
    architecture = architecture or ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(str(path), architecture, split_max_tensors=split)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    if (head_dim := config.get("head_dim")) is not None:
        writer.add_key_length(head_dim)
    for key, value in metadata.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(f"{architecture}.{key}", value)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in tensors.items():
        if architecture == "llama" and ".q_proj." in name:
            tensor = _paired(tensor, config["num_attention_heads"])
        if architecture == "llama" and ".k_proj." in name:
            tensor = _paired(tensor, config["num_key_value_heads"])
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        kind = (types or {}).get(name)
        if kind is not None:
            encoded = encode(tensor.float().numpy(), kind)
            writer.add_tensor(theirs, encoded, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            _add_plain(writer, theirs, tensor if tensor.ndim > 1 else tensor.float())
    for name, tensor in (extra or {}).items():
        _add_plain(writer, name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split else sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0]


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Mapping[str, Any]) -> None:
    vocab = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(sorted(vocab, key=vocab.get))
    writer.add_token_types([3 if number in special else 1 for number in range(len(vocab))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")


def _paired(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows as `LlamaModel.permute` of convert_hf_to_gguf.py does."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _add_plain(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype is torch.bfloat16:
        values = tensor.contiguous().view(torch.int16).numpy().view(np.uint8)
        writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.contiguous().numpy())


def read_tokenizer(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "tokenizer.json").read_text())
