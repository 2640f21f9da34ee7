"""Writes adapters in PEFT's file layout without PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 4


def factors(matrices: Mapping[str, tuple[int, int]], seed: int, rank: int = RANK) -> dict[str, torch.Tensor]:
    found = {}
    for name, (outputs, inputs) in matrices.items():
        random = torch.Generator().manual_seed(hash((seed, len(name), *name.encode())) % 2**31)
        prefix = f"base_model.model.{name}"
        found[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) / inputs**0.5
        found[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) / rank**0.5
    return found


def save(folder: Path, tensors: Mapping[str, torch.Tensor], **config: object) -> None:
    stated = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", **config}
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
