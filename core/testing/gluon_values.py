"""Values of gluon_interpreter.py: tensors in registers, pointers, shared memory and tensor maps."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_TYPES = {
    gl.int1: torch.bool,
    gl.int8: torch.int8,
    gl.uint8: torch.uint8,
    gl.int16: torch.int16,
    gl.int32: torch.int32,
    gl.int64: torch.int64,
    gl.float16: torch.float16,
    gl.bfloat16: torch.bfloat16,
    gl.float32: torch.float32,
    gl.float64: torch.float64,
    gl.float8e4nv: torch.float8_e4m3fn,
}
_NAMES = {theirs: ours for ours, theirs in _TYPES.items()}


def raw(dtype: Any) -> torch.dtype:
    """Return torch's type."""
    return _TYPES[dtype]


def typed(data: torch.Tensor) -> Value:
    return Value(data)


def value_of(x: Any) -> Value:
    """Return a number as a scalar, and a value as it is."""
    if isinstance(x, Value):
        return x
    if isinstance(x, bool):
        return Value(torch.tensor(x))
    if isinstance(x, int):
        return Value(torch.tensor(x, dtype=torch.int32 if -(2**31) <= x < 2**31 else torch.int64))
    return Value(torch.tensor(x, dtype=torch.float32))


def pair(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both operands in one type: a number takes the other's, if that can hold it."""
    if isinstance(a, Value) and isinstance(b, Value):
        wide = torch.promote_types(a.data.dtype, b.data.dtype)
        return a.data.to(wide), b.data.to(wide)
    if isinstance(a, Value):
        other = value_of(b).data
        wide = other.dtype if other.is_floating_point() and not a.data.is_floating_point() else a.data.dtype
        return a.data.to(wide), other.to(wide)
    if isinstance(b, Value):
        right, left = pair(b, a)
        return left, right
    return pair(value_of(a), value_of(b))


def _binary(apply: Callable[[Any, Any], Any], swapped: bool = False) -> Any:
    def method(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        a, b = pair(self, other)
        return Value(apply(b, a) if swapped else apply(a, b))

    return method


class Value:
    """A tensor in registers."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def dtype(self) -> Any:
        return _NAMES[self.data.dtype]

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None, shape=self.shape)

    @property
    def T(self) -> Value:
        return Value(self.data.T)

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        return Value(self.data.view(raw(dtype)) if bitcast else self.data.to(raw(dtype)))

    def permute(self, order: Sequence[int]) -> Value:
        return Value(self.data.permute(*order))

    def reshape(self, shape: Sequence[int]) -> Value:
        return Value(self.data.reshape(list(shape)))

    def __getitem__(self, at: Any) -> Value:
        return Value(self.data[at])

    def __index__(self) -> int:
        return int(self.data)

    def __int__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    __add__, __sub__, __mul__ = _binary(operator.add), _binary(operator.sub), _binary(operator.mul)
    __radd__, __rsub__, __rmul__ = __add__, _binary(operator.sub, True), __mul__
    __truediv__, __rtruediv__ = _binary(operator.truediv), _binary(operator.truediv, True)
    __floordiv__, __mod__ = _binary(operator.floordiv), _binary(operator.mod)
    __rfloordiv__, __rmod__ = _binary(operator.floordiv, True), _binary(operator.mod, True)
    __and__, __or__, __xor__ = _binary(operator.and_), _binary(operator.or_), _binary(operator.xor)
    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__
    __lshift__, __rshift__ = _binary(operator.lshift), _binary(operator.rshift)
    __lt__, __le__, __gt__ = _binary(operator.lt), _binary(operator.le), _binary(operator.gt)
    __ge__, __eq__, __ne__ = _binary(operator.ge), _binary(operator.eq), _binary(operator.ne)
    __hash__ = None

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __invert__(self) -> Value:
        return Value(~self.data)


class Pointer:
    """Pointers to elements of a tensor's memory."""

    def __init__(self, memory: torch.Tensor, at: torch.Tensor) -> None:
        self.memory, self.at = memory, at

    @classmethod
    def to_tensor(cls, x: torch.Tensor) -> Pointer:
        room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return cls(torch.as_strided(x, (room,), (1,)), torch.tensor(0))

    @property
    def dtype(self) -> Any:
        return gl.pointer_type(_NAMES[self.memory.dtype])

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.at + value_of(other).data.long())

    __radd__ = __add__

    def __getitem__(self, at: Any) -> Pointer:
        return Pointer(self.memory, self.at[at])

    def _where(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return places and mask of one shape. Raise IndexError if one of them is outside of the tensor's memory."""
        ok = torch.tensor(True) if mask is None else value_of(mask).data.bool()
        at, ok = torch.broadcast_tensors(self.at, ok)
        outside = ok & ((at < 0) | (at >= len(self.memory)))
        if outside.any():
            raise IndexError(f"element {int(at[outside][0])} of memory with {len(self.memory)} elements")
        return torch.where(ok, at, 0), ok

    def load(self, mask: Any, other: Any) -> Value:
        at, ok = self._where(mask)
        if not len(self.memory):
            return Value(torch.zeros(at.shape, dtype=self.memory.dtype))
        found = self.memory[at.flatten()].reshape(at.shape)
        if mask is None:
            return Value(found)
        return Value(torch.where(ok, found, torch.tensor(0 if other is None else other).to(found.dtype)))

    def store(self, value: Value, mask: Any) -> None:
        at, ok = self._where(mask)
        data = value.data.to(self.memory.dtype).broadcast_to(at.shape)
        self.memory[at[ok]] = data[ok]


class Shared:
    """Shared memory, as a descriptor of Gluon sees it."""

    def __init__(self, memory: torch.Tensor, at: torch.Tensor, dtype: Any) -> None:
        self._memory, self._at, self.dtype = memory, at, dtype

    @classmethod
    def allocate(cls, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
        at = _places(shape, raw(dtype).itemsize, layout)
        # All bits are set: a number that is read before it was written is NaN.
        memory = torch.full((at.numel() * raw(dtype).itemsize,), 0xFF, dtype=torch.uint8)
        return cls(memory, at, dtype)

    @property
    def shape(self) -> list[int]:
        return list(self._at.shape)

    @property
    def address(self) -> tuple[int, int]:
        """Memory and first byte: two places differ in one of them."""
        return self._memory.data_ptr(), int(self._at.flatten()[0])

    def index(self, at: Any) -> Shared:
        place = int(at)
        assert 0 <= place < len(self._at), f"place {place} of {len(self._at)}"
        return Shared(self._memory, self._at[place], self.dtype)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self._memory, self._at.narrow(dim, start, length), self.dtype)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self._memory, self._at.permute(*order), self.dtype)

    def _reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
        at = _places(shape, raw(dtype).itemsize, layout)
        assert at.numel() * raw(dtype).itemsize <= len(self._memory)
        return Shared(self._memory, at, dtype)

    def load(self, layout: Any = None) -> Value:
        flat = self._memory.view(raw(self.dtype))
        return Value(flat[self._at // raw(self.dtype).itemsize])

    def store(self, value: Value) -> None:
        assert value.dtype == self.dtype and value.shape == self.shape, f"{value.dtype} {value.shape} to {self.shape}"
        self._memory.view(raw(self.dtype))[self._at // raw(self.dtype).itemsize] = value.data


def _places(shape: Sequence[int], itemsize: int, layout: Any) -> torch.Tensor:
    """Return the byte at which each element is. Rows of a matrix for tensor cores are cut into boxes of their swizzle's
    width, which follow each other. (That lines of a box are permuted makes no difference to any view of it.)"""
    count = 1
    for size in shape:
        count *= size
    width = getattr(layout, "swizzle_byte_width", 0) // itemsize
    if len(shape) < 2 or not width or shape[-1] <= width:
        return torch.arange(count).reshape(list(shape)) * itemsize
    *outer, rows, columns = shape
    boxes = torch.arange(count).reshape(*outer, columns // width, rows, width)
    return boxes.transpose(-2, -3).reshape(*outer, rows, columns) * itemsize


class Descriptor:
    """A tensor map."""

    def __init__(self, given: TensorDescriptor) -> None:
        self._given, self.layout = given, given.layout
        self.dtype = _NAMES[given.base.dtype]
        nbytes = given.base.element_size()
        for size in given.block_shape:
            nbytes *= size
        self.block_type = SimpleNamespace(shape=list(given.block_shape), nbytes=nbytes)

    def box(self, coord: Sequence[int]) -> torch.Tensor:
        """Return the box at these coordinates; zeros outside of the tensor."""
        given = self._given
        whole = torch.as_strided(given.base, list(given.shape), list(given.strides)).view(torch.uint8)
        size = given.base.element_size()
        out = torch.zeros(*given.block_shape[:-1], given.block_shape[-1] * size, dtype=torch.uint8)
        cuts, parts = [], []
        for dim, (start, length) in enumerate(zip(coord, given.block_shape, strict=True)):
            scale = size if dim == len(coord) - 1 else 1
            first, end = max(start, 0), min(start + length, given.shape[dim])
            cuts.append(slice(first * scale, max(first, end) * scale))
            parts.append(slice((first - start) * scale, (max(first, end) - start) * scale))
        out[tuple(parts)] = whole[tuple(cuts)]
        return out.view(given.base.dtype)


def assembly(code: str, args: Sequence[Value]) -> Any:
    """Return the result of inline assembly of the kernels that are interpreted."""
    if code.startswith("mov.u32 $0, 0;") or "prefetch" in code or code.endswith("done: mov.u32 $0, 0;}"):
        return Value(torch.tensor(0, dtype=torch.int32))
    if "%clock" in code:
        return Value(torch.tensor(time.perf_counter_ns() % 2**31, dtype=torch.int32))
    if code.startswith(("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32")):
        two = torch.stack([one.data for one in args], -1).to(torch.bfloat16 if ".bf16x2" in code else torch.float16)
        return Value(two.view(torch.int32)[..., 0])
    if "prmt.b32 bytes, $2, 0, 0x3120;" in code:  # low and high bytes
        half = args[0].data.contiguous().view(torch.float8_e4m3fn).reshape(*args[0].shape, 2).half()
        return Value(half[..., 0]), Value(half[..., 1])
    if "cvt.rn.f16x2.e4m3x2" in code and "mul.rn.f16x2" in code:
        words, factors = torch.broadcast_tensors(*(one.data for one in args))
        eight = words.contiguous().view(torch.float8_e4m3fn).reshape(*words.shape, 4).half()
        factor = factors.contiguous().view(torch.float16).reshape(*words.shape, 2)
        scaled = (eight.reshape(*words.shape, 2, 2) * factor[..., None, :]).contiguous().view(torch.int32)[..., 0]
        return Value(scaled[..., 0]), Value(scaled[..., 1])
    raise NotImplementedError(f"inline assembly: {code}")
