"""Calls of CUDA's driver that torch has no names for: copies to any address, and waits that need no multiprocessor."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.core.errors import CapabilityError

LIBRARY = "libcuda.so.1"
WAIT, WRITE = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32 and WRITE_VALUE_32. The wait ends when the word is not before the value, as counters
that wrap around compare."""


IN_STREAM_ORDER, BESIDE_KERNELS = 1, 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM and CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE."""


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, which is a union of 48 bytes."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    )


class _Copying(ctypes.Structure):
    """CUmemcpyAttributes. The hints are for memory that the driver moves."""

    _fields_ = (("order", ctypes.c_uint32), ("hints", ctypes.c_uint32 * 4), ("flags", ctypes.c_uint32))


class Copies:
    """As the driver takes them: arrays of addresses, sources and sizes, one behind the other."""

    def __init__(self, moves: Sequence[tuple[int, int, int]]) -> None:
        self.moves, self.count, self._start = moves, len(moves), 0
        self._numbers = (ctypes.c_uint64 * (3 * self.count))(*(move[kind] for kind in range(3) for move in moves))
        self.to = ctypes.addressof(self._numbers)
        self._sources, self.nbytes = self.to + 8 * self.count, self.to + 16 * self.count

    def sources_from(self, start: int) -> int:
        """Where their addresses stand. The driver reads them before a call of it returns."""
        if start != self._start:
            self._start = start
            for i, (_, source, _) in enumerate(self.moves, self.count):
                self._numbers[i] = start + source
        return self._sources


class Driver:
    """Of one GPU. Addresses are plain numbers. What `copy` and `operate` do is enqueued on the current stream; their
    thread has used torch on the GPU before, which makes its context current."""

    def __init__(self, device: torch.device, words: int) -> None:
        """`device` with its index; `words`: of what `overwrite` is to overwrite."""
        self._index = device.index
        try:
            library = ctypes.CDLL(LIBRARY)
            self._copy, self._operate = library.cuMemcpyAsync, library.cuStreamBatchMemOp_v2
        except (OSError, AttributeError) as error:
            raise CapabilityError(
                [f"the CUDA driver has no waits between a stream's copies ({error}): choose collective.beside=nccl"]
            ) from error
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._operate.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32)
        self._copy_all = getattr(library, "cuMemcpyBatchAsync", None)
        """Since CUDA 12.8. With a call for each copy, eight GPUs wait for their hosts."""
        if self._copy_all is not None:
            at, size = ctypes.c_void_p, ctypes.c_size_t
            self._copy_all.argtypes = (at, at, at, size, at, at, size, at, at)
        self._copying, self._first = _Copying(IN_STREAM_ORDER, flags=BESIDE_KERNELS), ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(0)
        # Made now: memory that a copy engine reads takes a while to get, and waits of the device may be in its way.
        self._values = torch.zeros(words, dtype=torch.int32, pin_memory=True)
        # Streams of one priority share a few queues, and those that wait are of other ones.
        self._side = torch.cuda.Stream(device, priority=-2)

    def copies(self, moves: Sequence[tuple[int, int, int]]) -> Copies:
        """(to, source, bytes), for `copy`, which may take them again and again."""
        return Copies([move for move in moves if move[2]])

    def copy(self, copies: Copies, start: int = 0) -> None:
        """In any order: none reads what another writes. Sources count from `start`."""
        stream = self._stream()
        # The driver takes no batch on the default stream, where no step runs.
        if self._copy_all is None or copies.count < 2 or not stream:
            for to, source, nbytes in copies.moves:
                _check("cuMemcpyAsync", self._copy(to, start + source, nbytes, stream))
            return
        status = self._copy_all(
            copies.to,
            copies.sources_from(start),
            copies.nbytes,
            copies.count,
            ctypes.addressof(self._copying),
            ctypes.addressof(self._first),
            1,
            ctypes.addressof(self._failed),
            stream,
        )
        _check("cuMemcpyBatchAsync", status)

    def operations(self, each: Sequence[tuple[int, int]]) -> Any:
        """(WAIT or WRITE, address of a word), for `operate`, which may take them again and again."""
        return (_Operation * len(each))(*(_Operation(kind, address) for kind, address in each))

    def operate(self, operations: Any, value: int) -> None:
        """One after another, all with this value; what is written is seen after all that the stream did before."""
        value &= 0xFFFFFFFF
        for operation in operations:
            operation.value = value
        status = self._operate(self._stream(), len(operations), ctypes.addressof(operations), 0)
        _check("cuStreamBatchMemOp", status)

    # A step's tensors are those of inference mode, and no other thread may write to them without.
    @torch.inference_mode()
    def overwrite(self, words: torch.Tensor, value: int) -> None:
        """All of int32 `words` on the GPU, whatever its streams wait for; from any thread. But the call itself waits
        while another one is in the driver until a kernel has ended, as `.cpu()` is: who waits for results that hang on
        these words waits for an event."""
        self._values.fill_(value)
        with torch.cuda.stream(self._side):
            words.copy_(self._values, non_blocking=True)

    def _stream(self) -> int:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("copies between ranks count their turns on the host, and no graph can hold them")
        # As `torch.cuda.current_stream`, without an object: it is asked for a thousand times a step.
        return torch._C._cuda_getCurrentRawStream(self._index)


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} failed with CUresult {status}")
