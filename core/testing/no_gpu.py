"""Rank on an emulated H200: records or compiles the kernels of start and steps on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from dovetail.core.compose import Host
from dovetail.core.layers.weights import DummyTensor
from dovetail.core.testing.compiling import Compiled, compiled_for_hopper
from dovetail.core.tuning import cache, startup
from dovetail.core.worker import loader, warmup
from dovetail.core.worker.result_copies import ResultCopies, StepClock

HOST = Host(device="cuda", device_count=1, compute_capability=(9, 0), memory_bytes=140 << 30, platform="linux")
IN_PLACE = {torch.Tensor.__setitem__, torch.Tensor.copy_}


@contextmanager
def no_gpu(machine_code: bool = True) -> Iterator[Compiled]:
    """Let a Runner with engine.device=cuda and one rank load, bind and take steps as on an H200.

    Kernel launches are as in `compiled_for_hopper`. It needs model.load=dummy and engine.kv_pages. A graph replay does
    nothing, and results cannot be collected."""
    with ExitStack() as stack:

        def swap(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(owner, name, value))

        compiled = stack.enter_context(compiled_for_hopper(machine_code))
        fake = active_fake_mode()
        assert fake is not None
        fake.allow_non_fake_inputs = True
        stack.enter_context(_NoGPU())
        swap(torch.cuda, "device_count", lambda: 1)
        swap(torch.cuda, "set_device", lambda device: None)
        swap(torch.cuda, "synchronize", lambda device=None: None)
        swap(torch.cuda, "get_device_name", lambda device: "H200")
        swap(FakeTensor, "data_ptr", lambda self: 4096 + self.storage_offset() * self.element_size())
        swap(DummyTensor, "__getitem__", _without_values)
        swap(StepClock, "mark", lambda self: 0.0)
        swap(loader, "detect_host", lambda device: HOST)
        swap(loader, "reason_against_graphs", lambda *given: None)
        swap(warmup, "compile_ahead", _one_after_another)
        swap(warmup, "agreed", lambda mine, connection: list(mine))
        swap(loader, "_compile_server", lambda device: nullcontext())
        swap(cache, "cache_folder", lambda: Path("/nowhere"))
        swap(startup, "share", lambda text, *ranks: text)
        swap(loader, "Recorder", _NoGraphs)
        swap(ResultCopies, "send", lambda *given, **named: None)
        yield compiled


class _NoGraphs:
    def __call__(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        return lambda: None, call()

    def close(self) -> None:
        """Do nothing."""


class _NoGPU(TorchFunctionMode):
    """Keeps CPU tensors real and GPU tensors fake. A CPU build of torch rejects some calls on fake GPU tensors; their
    results are derived from the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if not any(map(_on_gpu, tree_leaves((args, kwargs)))):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in IN_PLACE:
            return args[0]
        if func is torch.Tensor.__bool__:
            return False  # Checks of weights find nothing wrong.
        if func is torch.tensor:
            with unset_fake_temporarily():
                made = func(*args, **{**kwargs, "device": "cpu"})
            return torch.empty(made.shape, dtype=made.dtype, device="cuda")
        if func is torch.Tensor.to and not isinstance(args[0], FakeTensor):
            return torch.empty(args[0].shape, dtype=kwargs.get("dtype", args[0].dtype), device="cuda")
        if func is torch.Tensor.__getitem__:
            return _view(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "not linked with support for cuda" not in str(error):
                raise
        with torch._C.DisableTorchFunction(), unset_fake_temporarily():
            out = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
        return tree_map(_to_gpu, out)


def _view(tensor: torch.Tensor, index: tuple[Any, ...]) -> torch.Tensor:
    """Return tensor[index] by calls that torch accepts, so that a view keeps its offset and thus its alignment."""
    dim = 0
    for place, each in enumerate(index):
        if each is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif each is Ellipsis:
            dim = tensor.dim() - sum(one is not None for one in index[place + 1 :])
        elif isinstance(each, slice):
            tensor, dim = torch.ops.aten.slice.Tensor(tensor, dim, each.start, each.stop, each.step or 1), dim + 1
        elif isinstance(each, int):
            tensor = tensor.select(dim, each)
        elif place == 0 or not isinstance(index[place - 1], torch.Tensor):
            # Tensors that follow each other index together.
            together = list(takewhile(lambda one: isinstance(one, torch.Tensor), index[place:]))
            tensor = torch.ops.aten.index.Tensor(tensor, [None] * dim + together)
            dim += max(one.dim() for one in together)
    return tensor


def _on_gpu(given: Any) -> bool:
    if isinstance(given, torch.Tensor):
        return isinstance(given, FakeTensor)
    return isinstance(given, str | torch.device) and str(given).startswith("cuda")


def _to_meta(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
    return torch.device("meta") if isinstance(given, torch.device) else given


def _to_gpu(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="cuda")
    return given


def _without_values(self: DummyTensor, index: Any) -> torch.Tensor:
    return torch.empty(self.stored.shape, dtype=self.dtype, device=self.device)[index]


@contextmanager
def _one_after_another(workers: int, server: None) -> Iterator[None]:
    yield
