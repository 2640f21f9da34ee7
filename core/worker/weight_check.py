"""Check of weights for NaN and infinity while they are loaded. It reads each tensor once, on the device, and makes the
host wait for the device only once, at the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dovetail.core.checkpoint import Checkpoint, LazyTensor
from dovetail.core.errors import ConfigError, shown

_PIECE = 1 << 24
"""Elements of an 8-bit tensor that are widened at a time."""


class WeightCheck:
    """Records the least and greatest value of every slice that a model reads, and rejects those that are not finite in
    the model's dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._names: list[str] = []
        self._bounds: list[torch.Tensor] = []

    def watch(self, name: str, opener: Callable[[], LazyTensor]) -> Callable[[], LazyTensor]:
        """Return an opener whose slices are on the device and are recorded under the tensor's name."""
        return lambda: _Watched(opener(), partial(self._record, name))

    def _record(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self.device)
        if tensor.is_floating_point() and tensor.dtype is not torch.float4_e2m1fn_x2 and tensor.numel():
            self._names.append(name)
            self._bounds.append(_bounds(tensor))
        return tensor

    def finish(self, checkpoint: Checkpoint) -> None:
        """Wait for the device. Raise ConfigError if a tensor has a value that is not finite, naming it and its file."""
        if not self._bounds:
            return
        bounds_N2 = torch.stack(self._bounds).cpu()
        faults: dict[str, str] = {}
        for name, bounds_2 in zip(self._names, bounds_N2, strict=True):
            if not bounds_2.isfinite().all():
                faults.setdefault(name, "has values that are NaN or infinite. Download or convert the checkpoint again")
            elif _plain(name) and not bounds_2.to(self.dtype).isfinite().all():
                faults.setdefault(
                    name,
                    f"has values up to {bounds_2.abs().max():g}, which are infinite in {self.dtype}. Set "
                    "engine.dtype=bfloat16 or engine.dtype=float32",
                )
        if faults:
            name, fault = next(iter(faults.items()))
            more = f" ({len(faults) - 1} other tensors have such values, too)" if len(faults) > 1 else ""
            raise ConfigError(f"{shown(checkpoint.tensors()[name].file)}: tensor {shown(name)} {fault}{more}")


class _Watched:
    """LazyTensor that passes each slice on to a function, and returns that function's result."""

    def __init__(self, lazy: LazyTensor, passed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._lazy, self._passed = lazy, passed

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._passed(self._lazy[index])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lazy, name)


def _bounds(tensor: torch.Tensor) -> torch.Tensor:
    """Return (least, greatest) in float32 on the tensor's device; NaN if the tensor has one. `aminmax` reads the tensor
    once, needs no copy of it and cannot overflow, as a sum could."""
    if tensor.itemsize > 1:
        return torch.stack(torch.aminmax(tensor)).float()
    # 8-bit floats have no reductions. They are exact in bfloat16.
    pieces = [torch.aminmax(piece.bfloat16()) for piece in tensor.flatten().split(_PIECE)]
    return torch.stack(torch.aminmax(torch.stack([torch.stack(piece) for piece in pieces]))).float()


def _plain(name: str) -> bool:
    """Whether the tensor is used in the model's dtype. Scales, which quantizers name otherwise, have their own."""
    return name.endswith((".weight", ".bias"))
