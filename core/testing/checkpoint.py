"""Contract suite for checkpoint readers, and a checkpoint in memory for tests of quantizers.

class TestArchive(CheckpointContract):
    reader = ArchiveCheckpoint

    def save(self, folder: Path) -> Path:
        return write_archive(folder / "model.archive", ...)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import Checkpoint, TensorHeader
from dovetail.core.interfaces.checkpoint import WeightSource
from dovetail.core.layers.weights import STORED_DTYPES
from dovetail.core.tokenizer import FILE, Tokenizer

__all__ = ["CheckpointContract", "MemoryCheckpoint"]


class MemoryCheckpoint(Checkpoint):
    """A checkpoint without files. `config` is its config.json, `files` are the other JSON objects by name."""

    def __init__(
        self,
        config: Mapping[str, Any],
        files: Mapping[str, Mapping[str, Any]] | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(Path("memory"))
        self._texts = {name: json.dumps(value) for name, value in {"config.json": config, **(files or {})}.items()}
        self._tensors = dict(tensors or {})

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        return False

    def text(self, name: str) -> str | None:
        return self._texts.get(name)

    def tensors(self) -> Mapping[str, TensorHeader]:
        names = {dtype: name for name, dtype in STORED_DTYPES.items()}
        return {
            name: TensorHeader(names[tensor.dtype], tuple(tensor.shape), self.path)
            for name, tensor in self._tensors.items()
        }

    def open(self) -> WeightSource:
        for name, tensor in self._tensors.items():
            yield name, partial(_Sliced, tensor)


class _Sliced:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


class CheckpointContract:
    """Tests of a reader with a checkpoint that `save` writes. It needs a config.json, a tokenizer and a matrix."""

    reader: type[Checkpoint]

    def save(self, folder: Path) -> Path:
        """Write a checkpoint into an empty folder. Return its path."""
        raise NotImplementedError("write a checkpoint and return its path")

    def test_it_recognizes_its_checkpoint_alone(self) -> None:
        with self._saved() as checkpoint, tempfile.TemporaryDirectory() as folder:
            assert self.reader.recognizes(checkpoint.path), f"recognizes({checkpoint.path}) must be true"
            file = Path(folder) / "notes"
            file.write_bytes(b"\0" * 8)
            for other in (file, Path(folder)):
                assert self.reader.recognizes(other) is False, "recognizes must be false for another file or folder"

    def test_config_and_tokenizer(self) -> None:
        with self._saved() as checkpoint:
            config = checkpoint.config()
            assert config.get("architectures"), "config() must have architectures, as config.json has"
            assert config == checkpoint.config(), "two calls of config() must return equal values"
            assert checkpoint.text(FILE) is not None, f"text({FILE!r}) must have the tokenizer"
            assert Tokenizer(checkpoint).vocab > 0
            assert str(checkpoint.path) in checkpoint.where("config.json"), (
                "where(name) must have the checkpoint's path"
            )

    def test_an_absent_text_is_none(self) -> None:
        with self._saved() as checkpoint:
            assert checkpoint.text("absent.json") is None, "text of an absent name must be None"

    def test_names_stay_inside(self) -> None:
        """A name may come from a file that is not trusted."""
        with self._saved() as checkpoint:
            outside = checkpoint.path.parent / "outside.json"
            outside.write_text("{}")
            for name in (f"../{outside.name}", str(outside)):
                try:
                    found = checkpoint.text(name)
                except ConfigError:
                    continue
                assert found is None, f"text({name!r}) must not read outside the checkpoint"

    def test_headers_are_those_of_the_tensors(self) -> None:
        with self._saved() as checkpoint:
            headers, opened = checkpoint.tensors(), dict(checkpoint.open())
            assert headers and headers.keys() == opened.keys(), "tensors() and open() must have the same names"
            for name, header in headers.items():
                lazy = opened[name]()
                assert list(lazy.get_shape()) == list(header.shape), f"{name}: the header's shape must be the tensor's"
                values = lazy[:]
                assert tuple(values.shape) == header.shape, f"{name}: the slice [:] must have the whole shape"
                assert values.dtype is STORED_DTYPES[header.dtype], f"{name}: the header's dtype must be the tensor's"
                assert header.file.is_file(), f"{name}: the header's file must exist"
                if header.blocks:
                    assert header.dtype == "U8" and len(header.shape) == 2, f"{name}: blocks must be U8 [rows, bytes]"
                    stated = checkpoint.config().get("quantization_config", {}).get("quant_method")
                    assert stated, f"{name} is in {header.blocks}: config() must state a quant_method"

    def test_slices_are_those_of_the_whole(self) -> None:
        with self._saved() as checkpoint:
            matrices = [(name, opener()) for name, opener in checkpoint.open() if len(opener().get_shape()) == 2]
            assert matrices, "the checkpoint must have a matrix"
            for name, lazy in matrices:
                rows, columns = lazy.get_shape()
                whole = lazy[:]
                for index in (slice(1, rows), (slice(None), slice(columns // 2, columns)), (slice(0, 1), slice(0, 1))):
                    assert torch.equal(_bytes(lazy[index]), _bytes(whole[index])), f"{name}: {index} differs"

    def test_a_truncated_file_is_named(self) -> None:
        with self._saved() as checkpoint:
            file = next(iter(checkpoint.tensors().values())).file
            content = file.read_bytes()
            file.write_bytes(content[: len(content) // 2])
            with pytest.raises(ConfigError, match=file.name):
                self.reader(checkpoint.path).tensors()

    def test_headers_load_no_torch(self) -> None:
        """They are read before a device is initialised, and on machines that only plan."""
        with self._saved() as checkpoint:
            module, name = self.reader.__module__, self.reader.__qualname__
            code = (
                f"import sys; from pathlib import Path; from {module} import {name}; "
                f"c = {name}(Path({str(checkpoint.path)!r})); c.config(); c.tensors(); "
                "raise SystemExit('torch' in sys.modules)"
            )
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr or "config() and tensors() must not import torch"

    @contextmanager
    def _saved(self) -> Iterator[Checkpoint]:
        with tempfile.TemporaryDirectory() as folder:
            inner = Path(folder) / "saved"
            inner.mkdir()
            yield self.reader(self.save(inner))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
