"""Memory for the tensors that stay the library's: buffers, which it computes, and parameters, which the checkpoint
fills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from dovetail.core.layers import Stored, Taker, Weight, WeightSet
from dovetail.plugins.model.transformers.plan import Cut, cuts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dovetail.core.checkpoint import LazyTensor
    from dovetail.core.interfaces import Collective


def make_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers of a model on the meta device. The library does so where it initializes weights. Raises
    ValueError for tensors that it leaves without values."""
    for weight in model.parameters():
        weight._is_hf_initialized = True
    for module in model.modules():
        module._is_hf_initialized = False
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.full_like(buffer, _UNSET.get(buffer.dtype, float("nan")), device=device)
    model.initialize_weights()
    if device.type != "meta":
        for path, module in model.named_modules():
            _check_values(path, module)


_UNSET = {torch.bool: False, **dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), 0)}
"""Values of buffers before the library computes them; NaN for other dtypes."""


def _check_values(path: str, module: nn.Module) -> None:
    for name, value in (*vars(module).items(), *module.named_buffers(recurse=False)):
        if not isinstance(value, torch.Tensor) or name in set(module._buffers) - module._non_persistent_buffers_set:
            continue
        if value.is_meta or (value.is_floating_point() and bool(value.isnan().any())):
            raise ValueError(f"the library does not compute {path}.{name} where it initializes weights")


def make_parameters(model: PreTrainedModel, device: torch.device, collective: Collective) -> Iterator[Taker]:
    """Allocate this rank's parameters. Yield what loads them, and buffers that are in checkpoints."""
    made: dict[int, nn.Parameter] = {}
    split = {path: cut for path, _, cut in cuts(model)} if collective.size > 1 else {}
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) not in made:
                made[id(weight)] = nn.Parameter(torch.empty_like(weight, device=device), requires_grad=False)
                yield _weight(f"{path}.{name}", made[id(weight)], split.get(f"{path}.{name}"), collective)
            module.register_parameter(name, made[id(weight)])
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                # Masks and indices, which older checkpoints lack, are computed; other values belong to the model.
                optional = not buffer.is_floating_point()
                stored = Stored(f"{path}.{name}", tuple(buffer.shape), "zeros", optional)
                yield WeightSet((stored,), lambda headers: None, partial(_take_buffer, stored.name, buffer))


def _weight(name: str, weight: torch.Tensor, cut: Cut | None, collective: Collective) -> Weight:
    init: Literal["normal", "ones", "zeros"] = (
        "zeros" if name.endswith("bias") else "ones" if weight.ndim == 1 else "normal"
    )
    if cut is None:
        return Weight(name, lambda lazy: weight.copy_(lazy[...]), tuple(weight.shape), init)
    rank, ranks = collective.rank, collective.size
    return Weight(name, lambda lazy: cut.take(lazy, weight, rank, ranks), cut.whole(weight.shape, ranks), init)


def _take_buffer(name: str, buffer: torch.Tensor, tensors: Mapping[str, LazyTensor]) -> None:
    buffer.copy_(tensors[name][...])
