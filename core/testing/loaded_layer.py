"""A loaded layer for the suite of quantizers, and the exact matmul. Shapes: T tokens, I input, O output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dovetail.core.interfaces import Activation, LinearMethod
from dovetail.core.layers.share import Wanted, shares_of
from dovetail.core.ops import encode
from dovetail.core.testing.model_driver import Lazy
from dovetail.core.testing.numeric import poisoned_memory


@dataclass(frozen=True)
class Loaded:
    """A finished layer and the matrix that it was loaded from."""

    method: LinearMethod
    params: dict[str, torch.Tensor]
    weight: torch.Tensor

    def apply(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        x: Activation = encode(x_TI, (self.method.input,))[self.method.input]
        with poisoned_memory():
            return self.method.apply(self.params, x, bias_O)

    def partial_scale(self, x_TI: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x: Activation = encode(x_TI, (self.method.input,))[self.method.input]
        return self.method.partial(self.params, x).scale or ()

    def partial(self, x_TI: torch.Tensor) -> torch.Tensor:
        x: Activation = encode(x_TI, (self.method.input,))[self.method.input]
        with poisoned_memory():
            return self.method.partial(self.params, x).completed()

    def exact(self, x_TI: torch.Tensor) -> torch.Tensor:
        return exact_product(x_TI, self.weight)


def load_part(
    method: LinearMethod, params: dict[str, torch.Tensor], part: slice, inp: int, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Load checkpoint tensors into the output rows `part` of a layer of one rank, as the core's layers do. Afterwards
    the memory that they were in has other values."""
    outputs, inputs = Wanted(part.stop - part.start, 0, part.stop - part.start), Wanted(inp, 0, inp)
    names = {name for record in method.tensors for name in record.names}
    assert tensors.keys() <= names, f"{sorted(tensors)} were given; the method reads {sorted(names)}"
    lazy = {f"part.{name}": Lazy(tensor) for name, tensor in tensors.items()}
    share = shares_of("part", method.tensors, lazy, outputs, inputs)
    method.load(params, part, share)
    for tensor in share.values():
        tensor.contiguous().view(-1).view(torch.uint8).fill_(255)


def exact_product(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the matmul in float64 on the host."""
    y_TO = x_TI.cpu().double() @ weight_OI.cpu().double().t()
    return y_TO if bias_O is None else y_TO + bias_O.cpu().double()
