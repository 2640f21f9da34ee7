"""Contract suite for the built-in checkpoint readers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from dovetail.core.checkpoint import FolderCheckpoint, locate
from dovetail.core.testing.checkpoint import CheckpointContract

TINY = locate("pkg://dovetail.plugins.model.bundled/tiny")
TENSORS = {
    "a.weight": torch.arange(12.0).view(3, 4).bfloat16(),
    "b.weight": torch.arange(12.0).view(4, 3).to(torch.float8_e4m3fn),
    "b.scale": torch.ones(4),
    "c.packed": torch.arange(6, dtype=torch.int32),
}


def save_texts(folder: Path) -> Path:
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text((TINY / name).read_text())
    return folder


class TestOneFile(CheckpointContract):
    reader = FolderCheckpoint

    def save(self, folder: Path) -> Path:
        save_file(TENSORS, folder / "model.safetensors")
        return save_texts(folder)


class TestShards(CheckpointContract):
    reader = FolderCheckpoint

    def save(self, folder: Path) -> Path:
        shards = {"one.safetensors": ["b.weight", "c.packed"], "two.safetensors": ["a.weight", "b.scale"]}
        for file, names in shards.items():
            save_file({name: TENSORS[name] for name in names}, folder / file)
        weight_map = {name: file for file, names in shards.items() for name in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return save_texts(folder)
