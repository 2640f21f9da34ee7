"""Merged linear layer whose parts have unlike weight formats, for instance q and k in 4 bits and v in 6: one matmul for
each run of parts of one format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import Activation, LinearMethod, LinearShape
from dovetail.core.interfaces.tensor_record import TensorRecord
from dovetail.core.interfaces.tuning import Tunable


@dataclass(frozen=True, slots=True)
class _Run:
    method: LinearMethod
    names: tuple[str, ...]
    rows: slice
    """Outputs of the layer."""
    index: int
    keys: list[str] = field(default_factory=list)
    """Names of the run's tensors, written by `create`. The layer's are these behind the run's index."""

    def params(self, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the run's own tensors."""
        return {key: params[f"{self.index}.{key}"] for key in self.keys}


class StackedLinear(LinearMethod):
    """Runs of parts, each with its own method. All must have the same input format."""

    def __init__(self, path: str, shape: LinearShape, runs: Sequence[tuple[LinearMethod, int]]) -> None:
        """`runs`: method and number of parts of each run, in the order of the layer's parts."""
        self.path, self.runs, self.shapes = path, [], []
        part = out = 0
        for index, (method, count) in enumerate(runs):
            sizes, names = shape.parts[part : part + count], shape.names[part : part + count]
            rows = slice(out, out + sum(sizes))
            self.runs.append(_Run(method, names, rows, index))
            self.shapes.append(replace(shape, out=sum(sizes), parts=sizes, names=names))
            part, out = part + count, rows.stop

    def tensors_of(self, name: str) -> tuple[TensorRecord, ...]:
        return next(run.method.tensors_of(name) for run in self.runs if name in run.names)

    def create(self, shape: LinearShape, device: torch.device) -> dict[str, torch.Tensor]:
        params: dict[str, torch.Tensor] = {}
        for run, part in zip(self.runs, self.shapes, strict=True):
            made = run.method.create(part, device)
            run.keys[:] = made
            params |= {f"{run.index}.{key}": value for key, value in made.items()}
        formats = {run.method.input for run in self.runs}
        if len(formats) > 1:
            names = " and ".join(sorted(fmt.name for fmt in formats))
            raise CapabilityError([f"{self.path}: its matrices need inputs in {names}, but are merged into one layer"])
        (self.input,) = formats
        sums = {run.method.sums for run in self.runs}
        self.sums = sums.pop() if len(sums) == 1 else None
        return params

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        run = next(run for run in self.runs if run.rows.start <= part.start < run.rows.stop)
        rows = slice(part.start - run.rows.start, part.stop - run.rows.start)
        run.method.load(run.params(params), rows, tensors)

    def finish(self, params: dict[str, torch.Tensor]) -> None:
        for run in self.runs:
            run.method.finish(run.params(params))

    def apply(self, params: dict[str, torch.Tensor], x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        outputs = [
            run.method.apply(run.params(params), x, None if bias is None else bias[run.rows]) for run in self.runs
        ]
        return torch.cat(outputs, dim=1)

    def tunables(self, params: dict[str, torch.Tensor], rows: int, *, defers: bool = False) -> Sequence[Tunable]:
        return [tunable for run in self.runs for tunable in run.method.tunables(run.params(params), rows)]
