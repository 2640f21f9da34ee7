"""quant=mixed: layers whose paths match patterns have one quantizer, all others another one. It can be nested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from dovetail.core.compose.choice import readers
from dovetail.core.compose.discovery import installed
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import (
    Checkpoint,
    ExpertMethod,
    ExpertShape,
    LinearMethod,
    LinearShape,
    Quantizer,
)
from dovetail.core.interfaces.checkpoint import WeightSource
from dovetail.core.layers.plain import PlainLinear
from dovetail.core.layers.plain_experts import PlainExperts
from dovetail.core.layers.stacked import StackedLinear
from dovetail.plugins.quant.auto import reader_of
from dovetail.plugins.quant.config import MixedConfig
from dovetail.plugins.quant.mixed.checkpoint import group_of, reads, split_groups
from dovetail.plugins.quant.parsing import read_ignored


class Mixed(Quantizer):
    config: MixedConfig

    def __init__(self, config: MixedConfig) -> None:
        super().__init__(config)
        self.those: Quantizer = config.those.build()
        self.rest: Quantizer = config.rest.build()
        self.groups: list[tuple[tuple[str, ...], Quantizer]] = []
        """Targets and quantizer of each group of a checkpoint."""
        self.ignored: tuple[str, ...] = ()
        """Matrices that a checkpoint with groups leaves plain."""

    def read_checkpoint(self, checkpoint: Checkpoint) -> None:
        hf = checkpoint.config()
        if not reads(hf):
            for quantizer in (self.those, self.rest):
                quantizer.read_checkpoint(checkpoint)
            return
        if self.config.layers:
            raise ConfigError("quant.layers is set, but this checkpoint states the format of each layer: leave it out")
        registry = installed()
        self.ignored = read_ignored(hf["quantization_config"], "ignore")
        for targets, config in split_groups(hf["quantization_config"]):
            view = _OneGroup(checkpoint, {**hf, "quantization_config": config})
            name = reader_of(view.config(), readers("quant", registry))
            component = registry.get("quant", name)
            quantizer = component.target()(component.component.config())
            quantizer.read_checkpoint(view)
            self.groups.append((targets, quantizer))
            self.kv_scale_tensors = self.kv_scale_tensors or quantizer.kv_scale_tensors

    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        if not self.groups:
            chosen = any(fnmatch(path, pattern) for pattern in self.config.layers)
            return (self.those if chosen else self.rest).linear(path, shape)
        methods = [(self._of(part.names[0]), part) for part in _parts(shape)]
        if len({id(quantizer) for quantizer, _ in methods}) == 1:
            return _method(methods[0][0], path, shape)
        return StackedLinear(path, shape, [(_method(quantizer, path, part), 1) for quantizer, part in methods])

    def experts(self, path: str, shape: ExpertShape) -> ExpertMethod | None:
        """Ask the quantizer of all matrices of the layer; None if there are several."""
        found: dict[int, Quantizer | None] = {}
        for expert, names in zip(shape.ids, shape.names, strict=True):
            for matrix, of_matrix in (("gate_up", names[:2]), ("down", names[2:])):
                matched = any(fnmatch(f"{path}.{expert}.{matrix}", pattern) for pattern in self.config.layers)
                quantizers = map(self._of, of_matrix) if self.groups else [self.those if matched else self.rest]
                found |= {id(quantizer): quantizer for quantizer in quantizers}
        if len(found) > 1:
            return None
        (quantizer,) = found.values()
        return PlainExperts() if quantizer is None else quantizer.experts(path, shape)

    def table(self, path: str, shape: LinearShape, *, lookup: bool) -> LinearMethod | None:
        quantizer = self._of(shape.names[0]) if self.groups else self.rest
        return None if quantizer is None else quantizer.table(path, shape, lookup=lookup)

    def kv_scales(self, layer: int) -> tuple[float, float]:
        return self.rest.kv_scales(layer)

    def _of(self, name: str) -> Quantizer | None:
        """Return the quantizer of a matrix of the checkpoint; None = it is plain."""
        return group_of(name, self.groups, self.ignored)


def _method(quantizer: Quantizer | None, path: str, shape: LinearShape) -> LinearMethod:
    return PlainLinear() if quantizer is None else quantizer.linear(path, shape)


def _parts(shape: LinearShape) -> Iterator[LinearShape]:
    for size, name in zip(shape.parts, shape.names, strict=True):
        yield replace(shape, out=size, parts=(size,), names=(name,))


class _OneGroup(Checkpoint):
    """A checkpoint with one group of its quantization_config."""

    def __init__(self, whole: Checkpoint, hf: dict[str, Any]) -> None:
        super().__init__(whole.path)
        self._whole, self._hf = whole, hf

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        return False

    def text(self, name: str) -> str | None:
        return self._whole.text(name)

    def tensors(self) -> Mapping[str, Any]:
        return self._whole.tensors()

    def open(self) -> WeightSource:
        return self._whole.open()

    def config(self) -> dict[str, Any]:
        return self._hf
