"""A random model in the layout in which gpt-oss is published: MXFP4 experts beside plain layers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .checkpoints import save_random

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = torch.cat((VALUES, -VALUES))
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
    ],
}


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
