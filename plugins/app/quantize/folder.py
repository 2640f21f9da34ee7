"""Folder that the app writes: a shard for each layer, the progress of the run, and at last config.json."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dovetail.core.errors import ConfigError
from dovetail.core.files import read_object

PROGRESS, SETTINGS = "progress.safetensors", "quantize.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")


class OutputFolder:
    """Files are written under another name and then renamed, so that one that exists is complete. A folder with
    config.json is a finished checkpoint; `SETTINGS` records how it was made."""

    def __init__(self, path: str, settings: Mapping[str, Any], layers: int) -> None:
        """`settings`: what the result depends on. Raises ConfigError unless the folder is new, empty, or that of a run
        with the same settings."""
        self.path, self.layers = Path(path).expanduser(), layers
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # A file that was not complete when its run ended.
            for left in self.path.glob("*.part"):
                left.unlink()
            found = sorted(file.name for file in self.path.iterdir())
        except OSError as error:
            raise ConfigError(f"quantize.output={path}: cannot be written ({error.strerror})") from None
        if found and SETTINGS not in found:
            raise ConfigError(f"quantize.output={path}: this folder has {found[0]}: give a new one, or empty it")
        if found:
            self._check(json.loads(json.dumps(settings)))
        else:
            self._write(SETTINGS, settings)
        self.finished = "config.json" in found
        self.done, self.hidden = self._progress() if PROGRESS in found else (0, None)

    def _check(self, settings: Mapping[str, Any]) -> None:
        before = read_object(self.path / SETTINGS)
        if changed := sorted(key for key in {*before, *settings} if before.get(key) != settings.get(key)):
            was = ", ".join(f"{key}={before.get(key)} (now {settings.get(key)})" for key in changed)
            raise ConfigError(
                f"quantize.output={self.path}: a run before made files in it with {was}: repeat its options, or give a "
                "new folder"
            )

    def _progress(self) -> tuple[int, torch.Tensor | None]:
        """Return (number of finished layers, output of the last one)."""
        with safe_open(self.path / PROGRESS, framework="pt") as file:
            hidden = file.get_tensor("hidden")
            return int(file.metadata()["layers"]), hidden if hidden.numel() else None

    def write_layer(self, index: int, tensors: Mapping[str, torch.Tensor], hidden: torch.Tensor | None) -> None:
        """Write a layer's shard, then the progress. `hidden`: the layer's output, which the next layer reads."""
        self._save(self._shard(index), tensors, {"format": "pt"})
        output = torch.empty(0) if hidden is None else hidden
        self._save(PROGRESS, {"hidden": output}, {"layers": str(index + 1)})

    def finish(self, others: Mapping[str, torch.Tensor], config: Mapping[str, Any], source: Path) -> None:
        """Write the tensors outside layers, the index, the other files of the checkpoint, and config.json last."""
        self._save(self._shard(self.layers), others, {"format": "pt"})
        names: dict[str, str] = {}
        size = 0
        for index in range(self.layers + 1):
            file = self.path / self._shard(index)
            size += file.stat().st_size
            with safe_open(file, framework="pt") as reader:
                names |= dict.fromkeys(reader.keys(), file.name)
        self._write(INDEX, {"metadata": {"total_size": size}, "weight_map": names})
        for file in source.iterdir():
            if file.is_file() and file.name not in ("config.json", INDEX) and not file.name.endswith(WEIGHTS):
                shutil.copyfile(file, self.path / file.name)
        (self.path / PROGRESS).unlink(missing_ok=True)
        self._write("config.json", config)

    def _shard(self, index: int) -> str:
        return f"model-{index + 1:05}-of-{self.layers + 1:05}.safetensors"

    def _save(self, name: str, tensors: Mapping[str, torch.Tensor], stated: dict[str, str]) -> None:
        part = self.path / f"{name}.part"
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, part, stated)
        # safetensors makes files that their owner alone can read, and a server often runs as another user.
        shutil.copymode(self.path / SETTINGS, part)
        os.replace(part, self.path / name)

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        part = self.path / f"{name}.part"
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(part, self.path / name)
