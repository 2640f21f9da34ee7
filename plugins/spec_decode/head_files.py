"""Files of drafters that are trained for one target: a folder with config.json and safetensors. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dovetail.core.checkpoint import FolderCheckpoint, locate
from dovetail.core.config_json import ConfigJson
from dovetail.core.errors import ConfigError, shown
from dovetail.core.files import path_kind
from dovetail.core.interfaces import Checkpoint, ModelSource
from dovetail.plugins.spec_decode.config import HeadFiles

MOST = {"layers": 2**10, "hidden": 2**18, "heads": 2**12, "head_dim": 2**12, "intermediate": 2**22, "vocab": 2**24}
"""Upper limits far above any drafter: a file that exceeds them is broken or hostile."""
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class HeadFolder(FolderCheckpoint):
    """Folder of a drafter. Its tensors are in model.safetensors, the files of an index, or a file of another name that
    this kind of drafter is published with."""

    def __init__(self, path: Path, others: Iterable[str] = ()) -> None:
        super().__init__(path)
        self.single = next((name for name in others if path_kind(path / name) == "file"), self.single)


def read_config(config: HeadFiles) -> ConfigJson:
    """Return config.json of the drafter."""
    if config.hf is not None:
        return ConfigJson(config.hf, "spec_decode.hf")
    return ConfigJson(_folder(config).config(), f"spec_decode.path={shown(Path(config.folder or ''))}: config.json")


def source_of(config: HeadFiles, others: Iterable[str] = ()) -> ModelSource:
    """Return the drafter's files; `others`: further names of a single file with all weights. Raises ConfigError for
    pickled weights, which would run code from the file, with the command that converts them."""
    if config.folder is None:
        return ModelSource(None, dummy=True)
    folder = _folder(config, others)
    names = sorted(entry.name for entry in folder.path.iterdir())
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if config.load == "auto" and pickled and not any(name.endswith(".safetensors") for name in names):
        raise ConfigError(
            f"spec_decode.path={shown(folder.path)}: weights are pickled ({shown(Path(pickled[0]))}), which would run "
            f"code from the file. Convert them inside the folder: {conversion(pickled[0])}"
        )
    return ModelSource(folder, config.load == "dummy")


def conversion(name: str) -> str:
    """Return the command that converts a pickled file to model.safetensors. It loads tensors only."""
    return (
        f"python -c \"import torch, safetensors.torch as s; t = torch.load('{name}', map_location='cpu', "
        "weights_only=True); s.save_file({n: x.clone() for n, x in t.items()}, 'model.safetensors')\""
    )


def _folder(config: HeadFiles, others: Iterable[str] = ()) -> Checkpoint:
    assert config.folder is not None
    try:
        path = locate(config.folder)
    except ConfigError:
        raise ConfigError(f"spec_decode.path={shown(Path(config.folder))}: there is no such folder") from None
    if not HeadFolder.recognizes(path):
        raise ConfigError(f"spec_decode.path={shown(path)}: no folder with config.json. Set it to the drafter's folder")
    return HeadFolder(path, others)
