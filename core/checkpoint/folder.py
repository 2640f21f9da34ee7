"""Model folders in the Hugging Face layout: config.json, generation_config.json and safetensors, opened lazily.

Only safetensors files are read: pickled weights execute code when they are opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from dovetail.core.checkpoint.safetensors_file import open_headers, open_safetensors
from dovetail.core.errors import ConfigError, shown
from dovetail.core.files import is_inside, path_kind, read_object, read_text
from dovetail.core.interfaces.checkpoint import Checkpoint, TensorHeader, WeightSource
from dovetail.core.startup_notes import note

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class FolderCheckpoint(Checkpoint):
    """A folder with config.json. Its tensors are in model.safetensors, or in the files of an index."""

    single = _SINGLE
    """Name of a file that has all tensors."""

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        return path_kind(path / "config.json") == "file"

    def text(self, name: str) -> str | None:
        if not is_inside(name):
            raise ConfigError(f"{shown(self.path)}: {shown(name)} is outside the model folder")
        file = self.path / name
        return read_text(file) if path_kind(file) == "file" else None

    def tensors(self) -> Mapping[str, TensorHeader]:
        found: dict[str, TensorHeader] = {}
        for file, names in self._files():
            reader = open_headers(file)
            for name in sorted(_present(file, reader.keys(), names)):
                tensor = reader.get_slice(name)
                found[name] = TensorHeader(tensor.get_dtype(), tuple(tensor.get_shape()), file)
        return found

    def open(self) -> WeightSource:
        for file, names in self._files():
            reader = open_safetensors(file)
            for name in sorted(_present(file, reader.keys(), names)):
                yield name, partial(reader.get_slice, name)

    def _files(self) -> list[tuple[Path, list[str] | None]]:
        """Return (file, names of its tensors to read; None = all). As in transformers, a single file comes first."""
        folder = self.path
        single, index = (path_kind(folder / name) == "file" for name in (self.single, _INDEX))
        if single:
            if index:
                note(f"weights are read from {self.single}; {_INDEX} next to it is not used")
            return [(folder / self.single, None)]
        if index:
            by_file: dict[str, list[str]] = {}
            for name, file in _weight_map(folder / _INDEX).items():
                by_file.setdefault(file, []).append(name)
            return [(folder / file, names) for file, names in sorted(by_file.items())]
        found = sorted(file.name for file in folder.iterdir())
        pickled = [name for name in found if name.endswith(_PICKLED)]
        if pickled:
            raise ConfigError(
                f"model.path={folder}: weights are pickled ({shown(Path(pickled[0]))}), which would run code from the "
                "file. Convert them to safetensors (transformers: model.save_pretrained), or set model.load=dummy"
            )
        listed = ", ".join(shown(Path(name), 80) for name in found[:8])
        raise ConfigError(
            f"model.path={folder}: neither {self.single} nor {_INDEX} in the folder, which holds "
            f"{listed or 'nothing'}. Set model.path=<folder with weights>, or model.load=dummy"
        )


def _present(file: Path, held: list[str], names: list[str] | None) -> list[str]:
    """Return the names to read. Raises ConfigError if the index lists a tensor that is not in the file."""
    if names is not None and (absent := sorted(set(names).difference(held))):
        raise ConfigError(
            f"{shown(file)}: {_INDEX} lists {len(absent)} tensors that are not in it, first {shown(absent[0])}"
        )
    return held if names is None else names


def _weight_map(index: Path) -> Mapping[str, str]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{index}: no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not is_inside(file):
            raise ConfigError(f"{index}: tensor {shown(name)} is in {shown(file)}, outside the model folder")
        if not file.endswith(".safetensors"):
            raise ConfigError(f"{index}: tensor {shown(name)} is in {shown(file)}; only safetensors files are read")
    for file in set(weight_map.values()):
        if path_kind(index.parent / file) != "file":
            raise ConfigError(f"{index}: {shown(Path(file))} is missing from the folder (an interrupted download?)")
    return weight_map
