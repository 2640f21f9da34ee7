"""Interpreter for kernels in Gluon, on the CPU with torch: Triton's own one (TRITON_INTERPRET=1) does not run them.

Programs run one after another, and the partitions of a warp-specialized one in threads, which wait at barriers in
shared memory as warps do. What it shows: results, accesses outside of tensors, and barriers that are never completed.
What it does not: races within a partition (a partition runs as one thread, and copies and products are done when they
are started), layouts, registers and time.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dovetail.core.testing.gluon_values import Descriptor, Pointer, Shared, Value, assembly, pair, raw, typed, value_of

PATIENCE = 60.0
"""Seconds after which a partition that waits at a barrier has waited too long."""
LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl"}


class StuckError(RuntimeError):
    """A partition waits at a barrier that nothing completes."""


class _Barrier:
    """An mbarrier: its phase ends once all arrivals and all announced bytes have come."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def change(self, arrivals: int, nbytes: int) -> None:
        assert arrivals <= self.pending, f"{arrivals} arrivals at a barrier that waits for {self.pending}"
        self.pending -= arrivals
        self.bytes += nbytes
        if not self.pending and not self.bytes:
            self.phase ^= 1
            self.pending = self.count


class _Program:
    """State of the program that runs."""

    def __init__(self, index: Sequence[int], grid: Sequence[int], warps: int) -> None:
        self.index, self.grid = index, grid
        self.barriers: dict[tuple[int, int], _Barrier] = {}
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self.partition = threading.local()
        self.warps = warps

    @property
    def threads(self) -> int:
        """Threads of the partition that asks."""
        return 32 * getattr(self.partition, "warps", self.warps)

    def barrier(self, at: Shared) -> _Barrier:
        return self.barriers[at.address]

    def change(self, at: Shared, arrivals: int, nbytes: int) -> None:
        with self.changed:
            self.barrier(at).change(arrivals, nbytes)
            self.changed.notify_all()

    def wait(self, at: Shared, parity: int) -> None:
        """Wait until the phase of this parity has ended."""
        with self.changed:
            ended = self.changed.wait_for(lambda: self.error or self.barrier(at).phase != parity, PATIENCE)
        if self.error is not None:
            raise StuckError("another partition failed") from self.error
        if not ended:
            raise StuckError(f"a partition has waited for {PATIENCE:.0f} s at a barrier")

    def specialize(self, works: Sequence[tuple[Any, tuple[Any, ...]]], warps: Sequence[int]) -> None:
        """Run the partitions, the first one in this thread."""

        def run(work: Any, args: tuple[Any, ...], count: int) -> None:
            self.partition.warps = count
            _running.program = self
            try:
                work(*args)
            except BaseException as error:
                with self.changed:
                    self.error = self.error or error
                    self.changed.notify_all()

        sizes = [self.warps, *warps]
        threads = [threading.Thread(target=run, args=(*work, size)) for work, size in zip(works, sizes, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error


_running = threading.local()


def _program() -> _Program:
    return _running.program


class _Function:
    """A function of a kernel, whose names are those of this module."""

    def __init__(self, fn: Any) -> None:
        self._fn = fn
        self._translated: FunctionType | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._translated is None:
            names = {name: _translated(value) for name, value in self._fn.__globals__.items()}
            fn = self._fn
            self._translated = FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__)
        return self._translated(*args, **kwargs)


_functions: dict[Any, _Function] = {}


def _translated(value: Any) -> Any:
    """Return what a global name of a kernel's module means here."""
    if isinstance(value, ModuleType) and value in (gl, tl):
        return LANGUAGE
    if isinstance(value, ModuleType) and value in _MODULES:
        return _MODULES[value]
    if isinstance(value, gl.constexpr):
        return value.value
    if isinstance(getattr(value, "fn", None), FunctionType) and hasattr(value, "arg_names"):
        return _functions.setdefault(value.fn, _Function(value.fn))
    if getattr(value, "__triton_builtin__", False):
        return getattr(LANGUAGE, value.__name__, value)
    return value


class _Language:
    """The functions of Gluon and Triton that kernels call. Types, layouts and the like are Gluon's own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(gl, name)

    constexpr, static_range = staticmethod(lambda x: x), range

    @staticmethod
    def SliceLayout(dim: int, parent: Any) -> None:
        return None

    @staticmethod
    def program_id(axis: int) -> Value:
        return typed(torch.tensor(_program().index[axis], dtype=torch.int32))

    @staticmethod
    def num_programs(axis: int) -> Value:
        return typed(torch.tensor(_program().grid[axis], dtype=torch.int32))

    @staticmethod
    def num_warps() -> int:
        return _program().threads // 32

    @staticmethod
    def arange(start: int, end: int, layout: Any = None) -> Value:
        return typed(torch.arange(start, end, dtype=torch.int32))

    @staticmethod
    def full(shape: Sequence[int], value: Any, dtype: Any, layout: Any = None) -> Value:
        return typed(torch.full(list(shape), value, dtype=raw(dtype)))

    @classmethod
    def zeros(cls, shape: Sequence[int], dtype: Any, layout: Any = None) -> Value:
        return cls.full(shape, 0, dtype)

    @staticmethod
    def zeros_like(x: Value) -> Value:
        return typed(torch.zeros_like(x.data))

    @staticmethod
    def convert_layout(x: Value, layout: Any, assert_trivial: bool = False) -> Value:
        return x

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        condition = value_of(condition).data.bool()
        a, b = pair(a, b)
        return typed(torch.where(condition, a, b))

    @staticmethod
    def maximum(a: Any, b: Any, propagate_nan: Any = None) -> Value:
        a, b = pair(a, b)
        kept = a.dtype.is_floating_point and propagate_nan is None
        return typed(torch.fmax(a, b) if kept else torch.maximum(a, b))

    @staticmethod
    def minimum(a: Any, b: Any, propagate_nan: Any = None) -> Value:
        a, b = pair(a, b)
        kept = a.dtype.is_floating_point and propagate_nan is None
        return typed(torch.fmin(a, b) if kept else torch.minimum(a, b))

    @staticmethod
    def max(x: Value, axis: int) -> Value:
        return typed(x.data.amax(axis))

    @staticmethod
    def sum(x: Value, axis: int) -> Value:
        return typed(x.data.sum(axis, dtype=x.data.dtype))

    @staticmethod
    def exp(x: Value) -> Value:
        return typed(x.data.exp())

    @staticmethod
    def exp2(x: Value) -> Value:
        return typed(x.data.exp2())

    @staticmethod
    def log2(x: Value) -> Value:
        return typed(x.data.log2())

    @staticmethod
    def reshape(x: Value, shape: Sequence[int]) -> Value:
        return x.reshape(shape)

    @staticmethod
    def permute(x: Value, order: Sequence[int]) -> Value:
        return x.permute(order)

    @staticmethod
    def expand_dims(x: Any, axis: int) -> Any:
        """Add a dimension of 1, to values or to pointers."""
        return x[(slice(None),) * axis + (None,)]

    @classmethod
    def full_like(cls, x: Value, value: Any) -> Value:
        return cls.full(x.shape, value, x.dtype)

    @staticmethod
    def rsqrt(x: Value) -> Value:
        return typed(x.data.rsqrt())

    @staticmethod
    def mma_v2(a: Value, b: Value, acc: Value, **options: Any) -> Value:
        return typed(acc.data + a.data.float() @ b.data.float())

    @staticmethod
    def join(a: Value, b: Value) -> Value:
        return typed(torch.stack((a.data, b.data), -1))

    @staticmethod
    def split(x: Value) -> tuple[Value, Value]:
        return typed(x.data[..., 0]), typed(x.data[..., 1])

    @staticmethod
    def load(pointers: Pointer, mask: Any = None, other: Any = None, **options: Any) -> Value:
        return pointers.load(mask, other)

    @staticmethod
    def store(pointers: Pointer, value: Any, mask: Any = None, **options: Any) -> None:
        pointers.store(value_of(value), mask)

    @staticmethod
    def atomic_add(pointers: Pointer, value: Any, **options: Any) -> Value:
        before = pointers.load(None, None)
        pointers.store(before + value, None)
        return before

    @staticmethod
    def inline_asm_elementwise(code: str, constraints: str, args: Sequence[Any], **options: Any) -> Any:
        if "ld.relaxed.gpu.global.v4.b32" in code:
            return _polled(*args)
        return assembly(code, [value_of(one) for one in args if not isinstance(one, Pointer)])

    @staticmethod
    def allocate_shared_memory(dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
        return Shared.allocate(dtype, shape, layout)

    @staticmethod
    def warp_specialize(works: Sequence[Any], warps: Sequence[int], registers: Sequence[int]) -> None:
        _program().specialize(works, warps)

    @staticmethod
    def warpgroup_mma(a: Any, b: Shared, acc: Value, use_acc: bool = True, **options: Any) -> Value:
        left = (a if isinstance(a, Value) else a.load()).data
        right, sums = b.load().data, acc.data.dtype
        assert left.dtype == right.dtype, f"{left.dtype} x {right.dtype}"
        wide = torch.float64 if sums is torch.int32 else torch.float32
        product = (left.to(wide) @ right.to(wide)).to(sums)
        return typed(acc.data + product if use_acc else product)

    @staticmethod
    def warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Value] = ()) -> Any:
        return deps[0] if len(deps) == 1 else tuple(deps)

    @staticmethod
    def fence_async_shared(cluster: bool = False) -> None:
        pass

    thread_barrier = barrier = gdc_wait = gdc_launch_dependents = staticmethod(lambda: None)


LANGUAGE = _Language()


def _polled(*pointers: Pointer) -> tuple[Value, ...]:
    """Return the words of mailboxes, four from the address of the first. They have arrived: programs run in order."""
    found = []
    for one in pointers:
        at = one + typed(torch.arange(one.at.shape[-1], dtype=torch.int32) % 4)
        found.append(at.load(None, None))
    return tuple(found)


def _init(at: Shared, count: int) -> None:
    _program().barriers[at.address] = _Barrier(count)


def _arrive(at: Shared, count: int = 1, pred: Any = True) -> None:
    if pred:
        _program().change(at, count, 0)


def _wait(at: Shared, phase: Any, pred: Any = True) -> None:
    if pred:
        _program().wait(at, int(phase))


def _expect(at: Shared, nbytes: int, pred: Any = True) -> None:
    if pred:
        _program().change(at, 1, nbytes)


def _copy_box(source: Descriptor, coord: Sequence[Any], at: Shared, to: Shared, pred: Any = True) -> None:
    if pred:
        to.store(typed(source.box([int(c) for c in coord])))
        _program().change(at, 0, -source.block_type.nbytes)


def _copy(to: Shared, pointers: Pointer, mask: Any = None, **options: Any) -> None:
    to.store(pointers.load(mask, 0))


def _arrive_copied(at: Shared, increment_count: bool = True) -> None:
    assert not increment_count
    _program().change(at, _program().threads, 0)


_MODULES = {
    mbarrier: SimpleNamespace(
        init=_init,
        arrive=_arrive,
        expect=_expect,
        wait=_wait,
        MBarrierLayout=mbarrier.MBarrierLayout,
    ),
    tma: SimpleNamespace(async_copy_global_to_shared=_copy_box),
    async_copy: SimpleNamespace(
        async_copy_global_to_shared=_copy,
        commit_group=lambda: None,
        wait_group=lambda pending: None,
        mbarrier_arrive=_arrive_copied,
    ),
}


def _given(value: Any) -> Any:
    """Return a kernel's argument."""
    if isinstance(value, torch.Tensor):
        return Pointer.to_tensor(value)
    if isinstance(value, TensorDescriptor):
        return Descriptor(value)
    return value_of(value) if isinstance(value, int | float) else value


def _launch(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
    warps = options.get("num_warps", 4)
    given = {name: value for name, value in options.items() if name not in LAUNCH_OPTIONS}
    bound = inspect.signature(kernel.fn).bind(*args, **given)
    constants = {name for name, one in bound.signature.parameters.items() if "constexpr" in str(one.annotation)}
    values = {name: x if name in constants else _given(x) for name, x in bound.arguments.items()}
    size = [*(grid if isinstance(grid, Sequence) else grid(values)), 1, 1][:3]
    run: Callable[..., None] = _translated(kernel)
    for z, y, x in product(*map(range, reversed(size))):
        _running.program = _Program((x, y, z), size, warps)
        run(**values)


@contextmanager
def interpreted_gluon() -> Iterator[None]:
    """Run launches of kernels in Gluon in this interpreter. Their tensors are on the CPU."""
    with patch.object(GluonJITFunction, "run", _launch):
        yield
