"""Random models in layouts in which models are published: gpt-oss with MXFP4 experts, DeepSeek V3 in FP8 blocks."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .checkpoints import in_blocks, save_random

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = torch.cat((VALUES, -VALUES))
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
    ],
}

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def pack(weight_EIO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (blocks [E, O, G, 16], scales [E, O, G], the weight that they are) of a stacked plain matrix."""
    blocks = weight_EIO.transpose(1, 2).unflatten(2, (-1, 32))
    exponent = (blocks.abs().amax(-1) / 6).log2().round()
    codes = (blocks / torch.exp2(exponent)[..., None]).unsqueeze(-1).sub(VALUES).abs().argmin(-1)
    exact = VALUES[codes] * torch.exp2(exponent)[..., None]
    pairs = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return pairs, (exponent + 127).to(torch.uint8), exact.flatten(2).transpose(1, 2)


def save_published(folder: Path, **changes) -> torch.nn.Module:
    """Save a random model as openai/gpt-oss-20b is published and return its transformers model."""
    model = save_random(folder, "gpt_oss", **changes)
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"], exact = pack(tensors.pop(name))
        model.get_parameter(name).data.copy_(exact)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))
    return model


def save_blocks(folder: Path, model: torch.nn.Module) -> None:
    """Rewrite a saved model with its matrices in E4M3 and a scale for each block, as deepseek-ai/DeepSeek-V3 is
    published, and give `model` the same weights."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    exact = {}
    for name in [name for name in tensors if name.endswith(("_proj.weight", "_mqa.weight"))]:
        tensors[name], tensors[f"{name}_scale_inv"], exact[name] = in_blocks(tensors[name], outputs=128)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": BLOCKS}))
    take(model, exact)


def take(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Set weights that have the names of a published checkpoint, in which each expert has matrices of its own."""
    for name, weight in weights.items():
        layer, routed, rest = name.partition(".experts.")
        if not routed:
            model.get_parameter(name).data.copy_(weight)
            continue
        expert, part = rest.split(".")[:2]
        stack = "down_proj" if part == "down_proj" else "gate_up_proj"
        matrix = model.get_parameter(f"{layer}.experts.{stack}").data[int(expert)]
        rows = {"gate_proj": matrix.chunk(2)[0], "up_proj": matrix.chunk(2)[1]}.get(part, matrix)
        rows.copy_(weight)
