"""Checkpoint readers with one fault each; the suite must reject each by the named test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from dovetail.core.checkpoint import FolderCheckpoint
from dovetail.core.files import read_text
from dovetail.core.interfaces import TensorHeader
from dovetail.core.testing.checkpoint import CheckpointContract
from dovetail.core.testing.suite import failures

from ..faults import each, rejects, suite, variant
from . import test_builtin

fault = partial(variant, FolderCheckpoint)


class ImportsTorch(FolderCheckpoint):
    def tensors(self) -> Mapping[str, TensorHeader]:
        import torch  # noqa: F401

        return super().tensors()


class LeavesItsFolder(FolderCheckpoint):
    def text(self, name: str) -> str | None:
        file = self.path / name
        return read_text(file) if file.is_file() else None


class ForgetsThatTensorsAreSliced:
    """Slices the rows of whatever is asked for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: object) -> torch.Tensor:
        return self.tensor[index[0] if isinstance(index, tuple) else index]


def open_rows(self: FolderCheckpoint):
    for name, tensor in load_file(self.path / "model.safetensors").items():
        yield name, partial(ForgetsThatTensorsAreSliced, tensor)


def without_tokenizer(self: FolderCheckpoint, name: str) -> str | None:
    return None if name == "tokenizer.json" else FolderCheckpoint.text(self, name)


def changed(**changes: object):
    def tensors(self: FolderCheckpoint) -> Mapping[str, TensorHeader]:
        return {name: replace(header, **changes) for name, header in FolderCheckpoint.tensors(self).items()}

    return tensors


def ignores_the_end(self: FolderCheckpoint) -> Mapping[str, TensorHeader]:
    try:
        return FolderCheckpoint.tensors(self)
    except ValueError:
        return {}


BROKEN: dict[str, list[type[FolderCheckpoint]]] = {
    "test_it_recognizes_its_checkpoint_alone": [
        fault("RecognizesAnything", recognizes=classmethod(lambda cls, path: True)),
        fault("RecognizesNothing", recognizes=classmethod(lambda cls, path: False)),
    ],
    "test_config_and_tokenizer": [
        fault("HasNoConfig", config=lambda self: {}),
        fault("HasNoTokenizer", text=without_tokenizer),
        fault("HidesItsPath", where=lambda self, name: name),
    ],
    "test_an_absent_text_is_none": [
        fault("HasAnyText", text=lambda self, name: FolderCheckpoint.text(self, name) or "{}"),
    ],
    "test_names_stay_inside": [LeavesItsFolder],
    "test_headers_are_those_of_the_tensors": [
        fault("HasNoHeaders", tensors=lambda self: {}),
        fault("StatesAnotherShape", tensors=changed(shape=(1, 1))),
        fault("StatesAnotherDtype", tensors=changed(dtype="F64")),
        fault("StatesAnotherFile", tensors=changed(file=Path("nowhere"))),
        fault("StatesBlocksOfPlainValues", tensors=changed(blocks="Q4_K")),
    ],
    "test_slices_are_those_of_the_whole": [fault("SlicesRowsAlone", open=open_rows)],
    "test_a_truncated_file_is_named": [fault("IgnoresTheEnd", tensors=ignores_the_end)],
    "test_headers_load_no_torch": [ImportsTorch],
}


def suite_of(reader: type[FolderCheckpoint]) -> CheckpointContract:
    return suite(CheckpointContract, reader=reader, save=test_builtin.TestOneFile.save)


@each(BROKEN)
def test_the_suite_rejects(broken: type[FolderCheckpoint], test: str) -> None:
    assert rejects(suite_of(broken), test)


def test_the_unbroken_one_passes() -> None:
    """TestOneFile runs the test that is skipped, which starts a process."""
    assert failures(suite_of(FolderCheckpoint), skip=("test_headers_load_no_torch",)) == {}
