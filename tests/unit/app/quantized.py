"""A written checkpoint, decoded by the layouts' unpackers into plain weights, and its perplexity in transformers."""

from __future__ import annotations

import inspect
import json
import math
import shutil
import textwrap
import types
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from dovetail.core.checkpoint import locate
from dovetail.core.compose.cli import main
from dovetail.core.layouts import awq, compressed_tensors, gptq

READERS = {
    "input_layernorm": ("self_attn.q", "self_attn.k", "self_attn.v"),
    "post_attention_layernorm": ("mlp.gate", "mlp.up"),
}
TINY = locate("pkg://dovetail.plugins.model.bundled/tiny")


def quantize(output: Path, *words: str, source: Path = TINY) -> int:
    chosen = ("app=quantize", "model=llama", f"model.path={source}", "engine.device=cpu")
    return main([*chosen, f"quantize.output={output}", *words])


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    files = [safe_open(file, framework="pt") for file in folder.glob("*.safetensors")]
    return {name: file.get_tensor(name) for file in files for name in file.keys()}


def weight_of(tensors: dict[str, torch.Tensor], stated: dict) -> torch.Tensor:
    """Return a matrix of plain weights from its tensors, by what quantization_config states."""
    if "weight" in tensors:
        return tensors["weight"].float() * tensors["weight_scale"].float()
    if stated["quant_method"] == "compressed-tensors":
        weights = stated["config_groups"]["group_0"]["weights"]
        codes, scale, zero = compressed_tensors.unpack(tensors, weights["num_bits"])
        zero = torch.tensor(2 ** (weights["num_bits"] - 1)).expand(scale.shape) if zero is None else zero
        group, order = weights.get("group_size", codes.shape[1]), tensors.get("weight_g_idx")
    else:
        awq_layout = stated["quant_method"] == "awq"
        codes, scale, zero = awq.unpack(tensors) if awq_layout else gptq.unpack(tensors, stated["bits"])[:3]
        group, order = stated["group_size"], tensors.get("g_idx")
    at = (torch.arange(codes.shape[1]) // group if order is None else order).long()
    return (codes.float() - zero.float()[:, at]) * scale.float()[:, at]


def plain_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a folder, decoded if they are quantized, float32."""
    stated = json.loads((folder / "config.json").read_text()).get("quantization_config")
    found = tensors_in(folder)
    if stated is None:
        return {name: tensor.float() for name, tensor in found.items()}
    plain, parts = {}, {}
    for name, tensor in found.items():
        prefix, _, last = name.rpartition(".")
        if prefix.endswith("_proj"):
            parts.setdefault(prefix, {})[last] = tensor
        elif not last.endswith("_scale"):
            plain[name] = tensor.float()
    return plain | {f"{prefix}.weight": weight_of(tensors, stated) for prefix, tensors in parts.items()}


def loaded(weights: dict[str, torch.Tensor], source: Path = TINY) -> LlamaForCausalLM:
    """Return a plain model with other weights, float32."""
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    absent = model.load_state_dict(weights, strict=False)
    assert not absent.unexpected_keys and set(absent.missing_keys) <= {"lm_head.weight"}
    return model


def perplexity(model: Callable, modules: tuple = (textwrap, types)) -> float:
    """Return the perplexity of the beginnings of modules' sources."""
    tokenizer, losses = AutoTokenizer.from_pretrained(TINY), []
    with torch.inference_mode():
        for module in modules:
            ids = torch.tensor([tokenizer(inspect.getsource(module)[:1500])["input_ids"]])
            logits = model(ids).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
    return math.exp(torch.cat(losses).mean().item())


def write_outliers(folder: Path) -> None:
    """Write the bundled model with six outlier channels in the output of each norm, which computes the same."""
    shutil.copytree(TINY, folder)
    tensors = tensors_in(TINY)
    for layer in range(8):
        for norm, readers in READERS.items():
            channels = torch.randperm(256)[:6]
            tensors[f"model.layers.{layer}.{norm}.weight"][channels] *= 30
            for reader in readers:
                tensors[f"model.layers.{layer}.{reader}_proj.weight"][:, channels] /= 30
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def quantize_activations(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Round the inputs of all matrices but the head to INT8 per token, as W8A8 kernels do."""

    def rounded(module: torch.nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
        scale = args[0].abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        return (args[0] / scale).round() * scale

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(rounded)
    return model
