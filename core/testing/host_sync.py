"""Detector of calls that would make the host wait for a GPU. It works on any machine; on a CPU they cause no delay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_WAITS = {
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__int__,
    torch.Tensor.cpu,
    torch.Tensor.item,
    torch.Tensor.masked_select,
    torch.Tensor.nonzero,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.unique,
    torch.allclose,
    torch.equal,
    torch.masked_select,
    torch.nonzero,
    torch.unique,
    torch.unique_consecutive,
}


class NoHostSync(TorchFunctionMode):
    """Context manager, `with NoHostSync("propose"):`. Fails at the first call that needs a device value on the host."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _waits(func, args, kwargs):
            name = getattr(func, "__name__", str(func))
            raise AssertionError(
                f"{self.what} calls {name}, which makes the host wait for the device: keep values and shapes on it"
            )
        return func(*args, **kwargs)


def _waits(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if func in _WAITS:
        return True
    if func in (torch.where, torch.Tensor.where):
        return len(args) + len(kwargs) == 1
    if func in (torch.repeat_interleave, torch.Tensor.repeat_interleave):
        return isinstance(args[-1], torch.Tensor) and kwargs.get("output_size") is None
    if func is torch.Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(i, torch.Tensor) and i.dtype is torch.bool for i in index)
    return False
