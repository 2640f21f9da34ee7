"""Model folders in the Hugging Face layout: config.json, generation_config.json and safetensors, opened lazily.

Importing this module loads no torch. Only safetensors files are read: pickled weights execute code when they are
opened.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import resources
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, Protocol

from dovetail.core.config_json import LARGEST, ConfigJson
from dovetail.core.errors import ConfigError, shown
from dovetail.core.startup_notes import note

PACKAGE_SCHEME = "pkg://"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class LazyTensor(Protocol):
    """A checkpoint tensor that reads only the requested slices (safetensors' get_slice)."""

    def get_shape(self) -> list[int]: ...
    def __getitem__(self, index: Any) -> Any: ...


WeightSource = Iterator[tuple[str, Callable[[], LazyTensor]]]
"""(name, opener) of every tensor. Openers stay valid after the iteration."""


def path_kind(path: str | Path) -> Literal["folder", "file", "none"]:
    """Return what is at a path, with ~ expanded and links followed. Raises ConfigError for a path that the operating
    system refuses, for instance for its length."""
    try:
        path = Path(path).expanduser()
        return "folder" if stat.S_ISDIR(path.stat().st_mode) else "file"
    except (FileNotFoundError, NotADirectoryError):
        return "none"
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{shown(Path(path))}: cannot be opened ({reason})") from None


def resolve(path: str) -> Path:
    """Return the folder of a `model.path`: a path, or pkg://package.module/folder inside an installed package."""
    folder = _in_package(path) if path.startswith(PACKAGE_SCHEME) else Path(path)
    if (kind := path_kind(folder)) == "folder":
        return folder.expanduser()
    reason = "is a file" if kind == "file" else "does not exist"
    raise ConfigError(
        f"model.path={shown(Path(path))}: this folder {reason}. Set model.path=<folder with config.json and "
        "*.safetensors>, or model.load=dummy with model.hf for random weights of a shape"
    )


def read_config(path: str) -> dict[str, Any]:
    """Read config.json. An eos_token_id or bos_token_id of generation_config.json replaces its value."""
    folder = resolve(path)
    if path_kind(folder / "config.json") != "file":
        raise ConfigError(
            f"model.path={path}: no config.json in {folder}. Set model.path=<a Hugging Face model folder>"
        )
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if path_kind(generation) == "file":
        ids, vocab = ConfigJson(read_json(generation), str(generation)), config.get("vocab_size")
        largest = vocab - 1 if isinstance(vocab, int) and vocab > 0 else LARGEST
        for key in ("eos_token_id", "bos_token_id"):
            if ids.get(key) is not None:
                # The engine ends outputs at an EOS token; a BOS token that the model lacks is common and harmless.
                ids.counts(key, at_most=largest if key == "eos_token_id" else LARGEST)
                config[key] = ids.get(key)
    return config


def open_weights(path: str) -> WeightSource:
    """Iterate over all tensors, file by file. Raises ConfigError for missing, pickled or misplaced files."""
    folder = resolve(path)
    for file, names in _files(folder, path):
        reader = open_safetensors(file)
        held = set(reader.keys())
        if names is not None and (absent := sorted(set(names) - held)):
            raise ConfigError(
                f"{shown(file)}: {_INDEX} lists {len(absent)} tensors that are not in it, first {shown(absent[0])}"
            )
        for name in sorted(held if names is None else names):
            yield name, partial(reader.get_slice, name)


def file_of(path: str, name: str) -> Path:
    """Return the file from which `open_weights` reads a tensor."""
    files = _files(resolve(path), path)
    return next(file for file, names in files if name in (open_safetensors(file).keys() if names is None else names))


def _in_package(path: str) -> Path:
    package, _, inside = path.removeprefix(PACKAGE_SCHEME).partition("/")
    if not _is_inside(inside):
        raise ConfigError(f"model.path={path}: write pkg://package.module/folder, without '..'")
    try:
        return Path(str(resources.files(package))) / inside
    except (ModuleNotFoundError, ValueError) as error:
        raise ConfigError(f"model.path={path}: no package {package!r} is installed ({error})") from None


def _files(folder: Path, path: str) -> list[tuple[Path, list[str] | None]]:
    """Return (file, names of its tensors to read; None = all). As in transformers, a single file comes first."""
    single, index = (path_kind(folder / name) == "file" for name in (_SINGLE, _INDEX))
    if single:
        if index:
            note(f"weights are read from {_SINGLE}; {_INDEX} next to it is not used")
        return [(folder / _SINGLE, None)]
    if index:
        by_file: dict[str, list[str]] = {}
        for name, file in _weight_map(folder / _INDEX).items():
            by_file.setdefault(file, []).append(name)
        return [(folder / file, names) for file, names in sorted(by_file.items())]
    found = sorted(file.name for file in folder.iterdir())
    pickled = [name for name in found if name.endswith(_PICKLED)]
    if pickled:
        raise ConfigError(
            f"model.path={path}: weights are pickled ({shown(Path(pickled[0]))}), which would run code from the "
            "file. Convert them to safetensors (transformers: model.save_pretrained), or set model.load=dummy"
        )
    listed = ", ".join(shown(Path(name), 80) for name in found[:8])
    raise ConfigError(
        f"model.path={path}: neither {_SINGLE} nor {_INDEX} in {folder}, which holds "
        f"{listed or 'nothing'}. Set model.path=<folder with weights>, or model.load=dummy"
    )


def _weight_map(index: Path) -> Mapping[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{index}: no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_inside(file):
            raise ConfigError(f"{index}: tensor {shown(name)} is in {shown(file)}, outside the model folder")
        if not file.endswith(".safetensors"):
            raise ConfigError(f"{index}: tensor {shown(name)} is in {shown(file)}; only safetensors files are read")
    for file in set(weight_map.values()):
        if path_kind(index.parent / file) != "file":
            raise ConfigError(f"{index}: {shown(Path(file))} is missing from the folder (an interrupted download?)")
    return weight_map


def _is_inside(name: str) -> bool:
    """Whether a name from a file or the command line stays inside its folder, on any operating system. Symbolic links
    inside the folder are trusted, because download caches consist of them."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    outside = posix.is_absolute() or windows.drive or windows.root or ".." in (*posix.parts, *windows.parts)
    return bool(name) and not outside


def open_safetensors(file: Path) -> Any:
    """Return a reader with `keys()` and `get_slice(name)` -> LazyTensor. Raises ConfigError for an unreadable file."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{shown(file)}: cannot be read as safetensors ({shown(error)})") from None


def load_json(file: Path) -> Any:
    """Read a JSON value. Raises ConfigError for anything else."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{shown(file)}: cannot be read as JSON ({shown(error)})") from None


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError for anything else."""
    content = load_json(file)
    if not isinstance(content, dict):
        raise ConfigError(f"{shown(file)}: holds {type(content).__name__}, not an object")
    return content
