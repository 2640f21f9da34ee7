"""quant=mixed: layers whose paths match patterns have one quantizer, all others another one. It can be nested."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

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
from dovetail.core.startup_notes import note
from dovetail.plugins.quant.config import MixedConfig
from dovetail.plugins.quant.fp8.quantizer import fp8_head
from dovetail.plugins.quant.mixed.checkpoint import config_groups, group_of, reads
from dovetail.plugins.quant.parsing import read_ignored


class Mixed(Quantizer):
    config: MixedConfig

    def __init__(self, config: MixedConfig) -> None:
        super().__init__(config)
        self.those: Quantizer = config.those.build()
        self.rest: Quantizer = config.rest.build()
        self.groups: list[tuple[tuple[str, ...], Quantizer]] = []
        """Targets and quantizer of each group of a checkpoint."""
        self.with_plain_inputs: dict[int, Quantizer] = {}
        """Id of a group's quantizer -> the same with quant.activations=model, for those that have this value."""
        self.with_head: list[Quantizer] = []
        """Quantizers of groups with the option `head`."""
        self.ignored: tuple[str, ...] = ()
        """Matrices that a checkpoint with groups leaves plain."""
        self.slot_paths = self.those.slot_paths and self.rest.slot_paths

    def read_checkpoint(self, checkpoint: Checkpoint) -> None:
        hf, options = checkpoint.config(), self._options()
        if not reads(hf):
            self._refuse_options()
            for quantizer in (self.those, self.rest):
                quantizer.read_checkpoint(checkpoint)
            return
        if self.config.layers:
            raise ConfigError("quant.layers is set, but this checkpoint states the format of each layer: leave it out")
        self.ignored = read_ignored(hf["quantization_config"], "ignore")
        without: dict[str, list[str]] = {"activations": [], "many_rows": []}
        for group in config_groups(hf):
            selected, taken = group.selected(options)
            quantizer, view = selected.build(), _OneGroup(checkpoint, group.hf)
            quantizer.read_checkpoint(view)
            plain, taken_too = group.selected({**options, "activations": "model"})
            if "activations" in taken_too:
                self.with_plain_inputs[id(quantizer)] = plain.build()
                self.with_plain_inputs[id(quantizer)].read_checkpoint(view)
            self.groups.append((group.targets, quantizer))
            self.kv_scale_tensors = self.kv_scale_tensors or quantizer.kv_scale_tensors
            if "head" in taken:
                self.with_head.append(quantizer)
            self.slot_paths &= quantizer.slot_paths
            for option in without.keys() & options.keys() - taken:
                without[option].append(f"{group.name} (quant={selected.name})")
        for option, names in without.items():
            if names:
                self._cannot(option, names)

    def _options(self) -> dict[str, str]:
        """Return the options for the quantizers of groups that are set."""
        found = self.config.model_dump(include={"activations", "head", "many_rows"})
        return {name: value for name, value in found.items() if value != MixedConfig.model_fields[name].default}

    def _refuse_options(self) -> None:
        """Raise ConfigError for options of groups, since there are none."""
        for name, value in self._options().items():
            raise ConfigError(
                f"quant.{name}={value} is for a checkpoint with several config_groups: set quant.rest.{name} or "
                f"quant.those.{name}"
            )

    def _cannot(self, option: str, groups: list[str]) -> None:
        """Raise ConfigError if `option` applies to no group. Note that `activations` does not apply to these groups;
        those without `many_rows` have no weights of 4 bits."""
        reason = f"quant.{option}={self._options()[option]} does not apply to {' and '.join(groups)} of config_groups"
        if len(groups) == len(self.groups):
            raise ConfigError(f"{reason}, and there are no others: leave it out")
        if option == "activations":
            note(f"{reason}: inputs of these layers are as the checkpoint states")

    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        if not self.groups:
            chosen = any(fnmatch(path, pattern) for pattern in self.config.layers)
            return (self.those if chosen else self.rest).linear(path, shape)
        parts = [(self._of(part.names[0]), part) for part in _parts(shape)]
        if len({id(quantizer) for quantizer, _ in parts}) == 1:
            return _method(parts[0][0], path, shape)
        methods = [_method(quantizer, path, part) for quantizer, part in parts]
        if len(formats := {method.input for method in methods}) > 1:
            plain = self.with_plain_inputs
            methods = [_method(plain.get(id(quantizer), quantizer), path, part) for quantizer, part in parts]
            layers, names = re.sub(r"\.\d+\.", ".*.", path), " and ".join(sorted(each.name for each in formats))
            note(f"{layers} merges matrices with inputs in {names}, so they have the model's dtype where they can")
        return StackedLinear(path, shape, [(method, 1) for method in methods])

    def experts(self, path: str, shape: ExpertShape) -> ExpertMethod | None:
        """Ask the quantizer of all matrices of the layer; None if there are several."""
        found: dict[int, Quantizer | None] = {}
        for slot, names in enumerate(shape.names):
            own = shape.path_of(path, slot)
            for matrix, of_matrix in (("gate_up", names[:2]), ("down", names[2:])):
                matched = any(fnmatch(f"{own}.{matrix}", pattern) for pattern in self.config.layers)
                quantizers = map(self._of, of_matrix) if self.groups else [self.those if matched else self.rest]
                found |= {id(quantizer): quantizer for quantizer in quantizers}
        if len(found) > 1:
            return None
        (quantizer,) = found.values()
        return PlainExperts() if quantizer is None else quantizer.experts(path, shape)

    def table(self, path: str, shape: LinearShape, *, lookup: bool) -> LinearMethod | None:
        if not self.groups:
            self._refuse_options()  # Random weights have no headers that `read_checkpoint` could read.
            return self.rest.table(path, shape, lookup=lookup)
        quantizer, head = self._of(shape.names[0]), self.config.head
        method = None if quantizer is None else quantizer.table(path, shape, lookup=lookup)
        if path != "lm_head" or head == "auto" or quantizer in self.with_head:
            return method
        if method is not None:
            raise ConfigError(f"quant.head={head}: the checkpoint has quantized logits; set quant.head=auto")
        return fp8_head(head, path, shape)

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
