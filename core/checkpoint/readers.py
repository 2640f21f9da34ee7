"""Opens the checkpoint at a `model.path` with the reader that recognizes it, Dovetail's own or a package's."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from dovetail.core.compose import installed
from dovetail.core.compose.registry import Package, Problem, Registry
from dovetail.core.errors import ConfigError, DovetailError, PluginError, shown
from dovetail.core.files import is_inside, path_kind, refuse_pointer
from dovetail.core.interfaces.checkpoint import Checkpoint

PACKAGE_SCHEME = "pkg://"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint at a `model.path`. Raises ConfigError if nothing is there, or if no reader or several
    readers recognize it."""
    found = locate(str(path))
    recognized = []
    for package, reader in _readers(installed()):
        with _blamed(package, f"{reader.__name__}.recognizes fails"):
            if reader.recognizes(found):
                recognized.append((package, reader))
    if len(recognized) > 1:
        several = " and ".join(f"{reader.__name__} of {package}" for package, reader in recognized)
        raise ConfigError(
            f"model.path={shown(found)}: {several} recognize it. DOVETAIL_PLUGINS=-<package> disables a package"
        )
    if not recognized:
        refuse_pointer(found)
        what = f"no config.json in {shown(found)}" if found.is_dir() else "this file is of no known format"
        if files := sorted(found.glob("*.gguf")) if found.is_dir() else []:
            raise ConfigError(
                f"model.path={shown(Path(path))}: this folder has no config.json. A GGUF file is named itself, here "
                f"model.path={shown(files[0])}"
            )
        raise ConfigError(
            f"model.path={shown(Path(path))}: {what}. Set model.path=<a Hugging Face model folder, or a GGUF file>"
        )
    return recognized[0][1](found)


def locate(path: str) -> Path:
    """Return the existing folder or file of a `model.path`: a path, or pkg://package.module/folder inside an installed
    package."""
    located = _in_package(path) if path.startswith(PACKAGE_SCHEME) else Path(path)
    if path_kind(located) != "none":
        return located.expanduser()
    raise ConfigError(
        f"model.path={shown(Path(path))}: there is no such folder or file. Set model.path=<folder with config.json and "
        "*.safetensors, or a GGUF file>, or model.load=dummy with model.hf for random weights of a shape"
    )


def _in_package(path: str) -> Path:
    package, _, inside = path.removeprefix(PACKAGE_SCHEME).partition("/")
    if not is_inside(inside):
        raise ConfigError(f"model.path={path}: write pkg://package.module/folder, without '..'")
    try:
        return Path(str(resources.files(package))) / inside
    except (ModuleNotFoundError, ValueError) as error:
        raise ConfigError(f"model.path={path}: no package {package!r} is installed ({error})") from None


@functools.cache
def _readers(registry: Registry) -> list[tuple[Package, type[Checkpoint]]]:
    return [(package, load_reader(package, reference)) for package, reference in registry.checkpoint_readers]


def load_reader(package: Package, reference: str) -> type[Checkpoint]:
    """Import the reader at "module:Class". A failure names the package."""
    module, _, name = reference.partition(":")
    with _blamed(package, f"the checkpoint reader {reference} does not load"):
        reader = getattr(importlib.import_module(module), name)
    if not (isinstance(reader, type) and issubclass(reader, Checkpoint)):
        raise PluginError(str(package), f"the checkpoint reader {reference} is not a subclass of Checkpoint")
    return reader


def reader_problems(registry: Registry) -> tuple[Problem, ...]:
    """Return a problem for each reader that does not load."""
    problems = []
    for package, reference in registry.checkpoint_readers:
        try:
            load_reader(package, reference)
        except PluginError as error:
            problems.append(Problem(error.package, error.reason))
    return tuple(problems)


@contextmanager
def _blamed(package: Package, what: str) -> Iterator[None]:
    """Turn errors of the block, but not Dovetail's own, into a PluginError that names the package."""
    try:
        yield
    except DovetailError:
        raise
    except Exception as error:
        raise PluginError(str(package), f"{what}: {type(error).__name__}: {error}") from error
