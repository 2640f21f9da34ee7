"""Which Triton kernels start-up compiles and what each costs, on a machine without a GPU.

    python benchmarks/compile_time.py +preset=h200_fp8_tp1 model=llama3_8b engine.max_len=1024 engine.max_seqs=256

The engine is loaded on an H200 that is not there (dovetail.core.testing.compiling): shapes, dtypes, alignment and
constants are those of a real start, and every kernel goes down to machine code, one after another, in a cache of its
own. It says when a start meets each first:

    ahead     while kernels are compiled in threads
    measured  while memory is measured: one that the threads missed
    captured  while graphs are: the same

Seconds are those of this machine and of one core; `ast` is Python and holds its lock, the other stages do not.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from dovetail.core.compose import Host, compose
from dovetail.core.engine import runner as engine_runner
from dovetail.core.engine.runner import Runner
from dovetail.core.engine.step_clock import StepClock
from dovetail.core.layers.weights import DummyTensor
from dovetail.core.testing.compiling import compiled_for_hopper

HOST = Host(device="cuda", device_count=1, compute_capability=(9, 0), memory_bytes=140 << 30, platform="linux")
IN_PLACE = {torch.Tensor.__setitem__, torch.Tensor.copy_}


@dataclass
class Variant:
    name: str
    when: str
    stages: dict[str, float]
    """Seconds."""

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())


class _NoGPU(TorchFunctionMode):
    """CPU tensors are real, since hosts look at numbers; a GPU's have none. A CPU build of torch refuses some calls on
    these before it sees that they are fake: their results are made from what the meta device says."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if not any(map(_on_gpu, tree_leaves((args, kwargs)))):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in IN_PLACE:
            return args[0]
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
    """tensor[index] by calls that are not refused, so that a view keeps its place and thus its alignment."""
    dim = 0
    for place, each in enumerate(index):
        if each is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif each is Ellipsis:
            dim = tensor.dim() - (len(index) - place - 1)
        elif isinstance(each, slice):
            tensor, dim = torch.ops.aten.slice.Tensor(tensor, dim, each.start, each.stop, each.step or 1), dim + 1
        elif isinstance(each, int):
            tensor = tensor.select(dim, each)
        else:
            tensor, dim = torch.ops.aten.index.Tensor(tensor, [None] * dim + [each]), dim + 1
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


@contextmanager
def no_gpu() -> Iterator[None]:
    with ExitStack() as stack:

        def swap(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(owner, name, value))

        stack.enter_context(compiled_for_hopper())
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
        swap(engine_runner, "detect_host", lambda device: HOST)
        swap(engine_runner, "reason_against_graphs", lambda *given: None)
        swap(engine_runner, "compile_ahead", _one_after_another)
        swap(engine_runner.Outcomes, "send", lambda *given: None)
        yield


def _without_values(self: DummyTensor, index: Any) -> torch.Tensor:
    return torch.empty(self.weight.shape, dtype=self.dtype, device=self.device)[index]


@contextmanager
def _one_after_another(workers: int) -> Iterator[None]:
    yield


def _no_graph(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    return lambda: None, call()


def compiled(overrides: Sequence[str]) -> list[Variant]:
    """In the order of a start."""
    composition = compose([*overrides, "model.load=dummy", "engine.kv_pages=256"])
    found: list[Variant] = []
    when = "ahead"

    def listener(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if not cache_hit:
            stages = dict([("ast", times.ir_initialization), *times.lowering_stages])
            found.append(Variant(src.fn.__name__, when, {name: us * 1e-6 for name, us in stages.items()}))

    def quiet(phase: str, share: float | None) -> None:
        """No progress bar."""

    with tempfile.TemporaryDirectory() as cache, triton.knobs.cache.scope(), triton.knobs.compilation.scope(), no_gpu():
        triton.knobs.cache.dir, triton.knobs.compilation.listener = cache, listener
        runner = Runner(composition)
        runner.load(quiet)
        when, runner._why_no_graphs = "measured", "they are captured here, below"
        with torch.inference_mode():
            runner._rehearse()
        when = "captured"
        with runner._trial(runner.engine.page_size):
            runner.step_graphs().capture(_no_graph, quiet)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", help="as for run.py; a preset of one GPU")
    parser.add_argument("--each", action="store_true", help="a line for each variant, not for each kernel")
    args = parser.parse_args(argv)
    found = compiled(args.overrides)
    if args.each:
        for each in sorted(found, key=lambda each: -each.seconds):
            print(f"{each.seconds:7.2f} s  {each.when:8}  {each.name}")
    else:
        names: Counter[tuple[str, str]] = Counter()
        for each in found:
            names[each.name, each.when] += each.seconds  # type: ignore[assignment]
        for (name, when), seconds in names.most_common():
            variants = sum((each.name, each.when) == (name, when) for each in found)
            print(f"{seconds:7.2f} s  {variants:3} variants  {when:8}  {name}")
    stages: Counter[str] = Counter()
    for each in found:
        stages.update(each.stages)  # type: ignore[arg-type]
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in stages.items())
    longest = max(each.seconds for each in found)
    print(f"{len(found)} variants, {sum(each.seconds for each in found):.1f} s ({parts}); the longest {longest:.2f} s")
    for when in ("ahead", "measured", "captured"):
        mine = [each.seconds for each in found if each.when == when]
        print(f"{when:8} {len(mine):3} variants, {sum(mine):.2f} s")


if __name__ == "__main__":
    main()
