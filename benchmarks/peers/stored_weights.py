"""Checkpoints of random weights for compare.py --stored, in formats that vLLM reads and cannot draw: NF4 as
bitsandbytes stores it, and blocks of GGUF. The bits are random. Scales are such that weights are about as large as a
model's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import model_folder

from dovetail import Composition, ConfigError
from dovetail.core.checkpoint.gguf_metadata import ARCHITECTURES
from dovetail.core.ops.weight_formats import NF4_VALUES
from dovetail.plugins.quant.config import GGUFConfig
from dovetail.plugins.quant.gguf.blocks import FORMATS
from dovetail.plugins.quant.gguf.quantizer import GGUF

SPREAD = 0.02
"""Standard deviation of weights, about."""
HALVES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""GGUF type -> places in a block of its numbers in float16: the scale, and then the minimum."""
SCALES = {"Q4_0": 1 / 5, "Q8_0": 1 / 74, "Q4_K": 1 / 200, "Q5_K": 1 / 400, "Q6_K": 1 / 1400}
"""GGUF type -> the scale of random blocks with a standard deviation of 1, about."""
MIDDLES = {"Q4_K": 7.5, "Q5_K": 15.5}
"""GGUF type -> mean of its codes, which minimums subtract."""


def stored(composition: Composition, overrides: Sequence[str], form: str, folder: Path) -> list[str]:
    """Write a checkpoint of the composition's model in one of FORMS, and return the overrides with it in place of the
    model's shapes. Raises ConfigError for a model with weights."""
    if not model_folder.has_shapes_alone(composition):
        raise ConfigError(f"--stored {form}: the model has weights already; name one of shapes alone")
    path = FORMS[form](composition, folder)
    given = ("model=", "model.hf", "model.load", "quant=", "quant.mix")
    others = [word for word in overrides if not word.lstrip("+~").startswith(given)]
    name = composition.part("model").name
    return [*others, f"model={name}", f"model.path={path}", "quant=auto"]


def _nf4(composition: Composition, folder: Path) -> Path:
    """Write a folder as bitsandbytes quantizes a model: all linear layers but the logits, and their scales, too."""
    from safetensors.torch import save_file

    model_folder.write_folder(composition, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
    }
    draw, tensors = np.random.default_rng(0), dict[str, torch.Tensor]()
    for name, shape, is_matrix in _parameters(config):
        if is_matrix and not name.startswith("lm_head"):
            tensors |= {f"{name}{suffix}": tensor for suffix, tensor in _nf4_matrix(draw, shape).items()}
        else:
            tensors[name] = _plain(draw, shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _nf4_matrix(draw: np.random.Generator, shape: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the tensors of a matrix by the ends of their names."""
    count = shape[0] * shape[1]
    blocks = -(-count // 64)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 2 * SPREAD}
    return {
        "": _bytes(draw, count // 2)[:, None],
        ".absmax": _bytes(draw, blocks),
        ".quant_map": torch.tensor(NF4_VALUES),
        ".nested_absmax": torch.full((-(-blocks // 256),), SPREAD),
        ".nested_quant_map": torch.linspace(-1, 1, 256),
        ".quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _gguf(composition: Composition, folder: Path) -> Path:
    """Write a GGUF file with the types of `quant.mix`, beside a config.json, which vLLM reads."""
    try:
        import gguf
    except ImportError:
        raise ConfigError("--stored gguf: the package gguf writes the file; install it") from None
    model_folder.write_folder(composition, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architectures = {one.name: name for name, one in ARCHITECTURES.items()}
    (named,) = config["architectures"]
    if named not in architectures:
        raise ConfigError(f"--stored gguf: GGUF files are read for {', '.join(architectures)}, not {named}")
    quant = composition.part("quant").config
    types = GGUF(quant if isinstance(quant, GGUFConfig) else GGUFConfig())
    architecture = architectures[named]
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(str(path), architecture)
    _write_settings(writer, config)
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config["num_hidden_layers"])
    draw = np.random.default_rng(0)
    for name, shape, _ in _parameters(config):
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        kind = types.type_of(name.removesuffix(".weight"), shape[-1]) if len(shape) > 1 else ""
        if kind:
            writer.add_tensor(theirs, _blocks(draw, kind, shape), raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(theirs, _plain(draw, shape).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


FORMS: Mapping[str, Callable[[Composition, Path], Path]] = {"nf4": _nf4, "gguf": _gguf}


def _write_settings(writer: Any, config: Mapping[str, Any]) -> None:
    """Write the metadata, with the tokens of `model_folder.write_tokenizer`."""
    heads, vocab = config["num_attention_heads"], config["vocab_size"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    if config.get("head_dim") is not None:
        writer.add_key_length(config["head_dim"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    # Readers expect a merge.
    writer.add_token_list([*model_folder.words_of(vocab)[:-1], "ab"])
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * vocab)
    writer.add_eos_token_id(0)


def _parameters(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Yield name and shape of each parameter of the model in transformers, and whether it is the matrix of a linear
    layer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    others = {name: value for name, value in config.items() if name not in ("model_type", "quantization_config")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **others))
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for name, parameter in model.named_parameters():
        yield name, tuple(parameter.shape), name in linear


def _bytes(draw: np.random.Generator, count: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(draw.bytes(count)), dtype=torch.uint8)


def _plain(draw: np.random.Generator, shape: Sequence[int]) -> torch.Tensor:
    """Return a matrix in bfloat16; norms are 1."""
    if len(shape) == 1:
        return torch.ones(shape[0], dtype=torch.bfloat16)
    return (_bytes(draw, shape[0] * shape[1]).view(torch.int8).bfloat16() * (SPREAD / 74)).view(*shape)


def _blocks(draw: np.random.Generator, kind: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the bytes of a matrix in blocks of a GGUF type, [rows, bytes of a row]."""
    block, rows = FORMATS[kind], shape[0]
    width = shape[1] // block.values * block.size
    blocks = np.frombuffer(bytearray(draw.bytes(rows * width)), np.uint8).reshape(-1, block.size)
    scale = SPREAD * SCALES[kind]
    for at, value in zip(HALVES[kind], (scale, scale * MIDDLES.get(kind, 0.0)), strict=False):
        blocks[:, at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    return blocks.reshape(rows, width)
