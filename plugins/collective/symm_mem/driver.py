"""Calls of CUDA's driver that torch has no names for: copies to any address, and waits that need no multiprocessor."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

from dovetail.core.errors import CapabilityError

LIBRARY = "libcuda.so.1"
WAIT, WRITE = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32 and WRITE_VALUE_32. The wait ends when the word is not before the value, as counters
that wrap around compare."""


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


class Driver:
    """Of one GPU. Addresses are plain numbers. What `copy` and `operate` do is enqueued on the current stream; their
    thread has used torch on the GPU before, which makes its context current."""

    def __init__(self, device: torch.device, words: int) -> None:
        """`words`: of what `overwrite` is to overwrite."""
        self._device = device
        try:
            library = ctypes.CDLL(LIBRARY)
            self._copy, self._operate = library.cuMemcpyAsync, library.cuStreamBatchMemOp_v2
        except (OSError, AttributeError) as error:
            raise CapabilityError(
                [f"the CUDA driver has no waits between a stream's copies ({error}): choose collective.beside=nccl"]
            ) from error
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._operate.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32)
        # Made now: memory that a copy engine reads takes a while to get, and waits of the device may be in its way.
        self._values = torch.zeros(words, dtype=torch.int32, pin_memory=True)
        # Streams of one priority share a few queues, and those that wait are of other ones.
        self._side = torch.cuda.Stream(device, priority=-2)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        if nbytes:
            _check("cuMemcpyAsync", self._copy(to, source, nbytes, self._stream()))

    def operate(self, operations: Iterable[tuple[int, int, int]]) -> None:
        """(WAIT or WRITE, address of a word, value) one after another; what is written is seen after all that the
        stream did before."""
        each = [_Operation(kind, address, value & 0xFFFFFFFF) for kind, address, value in operations]
        if each:
            array = (_Operation * len(each))(*each)
            _check("cuStreamBatchMemOp", self._operate(self._stream(), len(each), array, 0))

    def overwrite(self, words: torch.Tensor, value: int) -> None:
        """At once, whatever waits; from any thread. All of int32 `words` on the GPU."""
        self._values.fill_(value)
        with torch.cuda.stream(self._side):
            words.copy_(self._values, non_blocking=True)

    def _stream(self) -> int:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("copies between ranks count their turns on the host, and no graph can hold them")
        stream: int = torch.cuda.current_stream(self._device).cuda_stream
        return stream


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} failed with CUresult {status}")
