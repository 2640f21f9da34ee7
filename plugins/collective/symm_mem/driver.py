"""CUDA driver calls that torch does not expose: copies to any address, and stream waits that occupy no SM."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.core.errors import CapabilityError

LIBRARY = "libcuda.so.1"
WAIT, WRITE = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32 and WRITE_VALUE_32. The wait ends when word >= value in wrap-around comparison."""
IN_STREAM_ORDER, BESIDE_KERNELS = 1, 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM and CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE."""


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, a union of 48 bytes."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    )


class _Copying(ctypes.Structure):
    """CUmemcpyAttributes. The hints concern managed memory only."""

    _fields_ = (("order", ctypes.c_uint32), ("hints", ctypes.c_uint32 * 4), ("flags", ctypes.c_uint32))


class Copies:
    """Copies in the form of the driver's batch call: consecutive arrays of destinations, sources and sizes."""

    def __init__(self, moves: Sequence[tuple[int, int, int]]) -> None:
        self.moves, self.count, self._start = moves, len(moves), 0
        self._numbers = (ctypes.c_uint64 * (3 * self.count))(*(move[kind] for kind in range(3) for move in moves))
        self.to = ctypes.addressof(self._numbers)
        self._sources, self.nbytes = self.to + 8 * self.count, self.to + 16 * self.count

    def sources_from(self, start: int) -> int:
        """Return the address of the array of sources, offset by `start`. Driver calls read it before they return."""
        if start != self._start:
            self._start = start
            for i, (_, source, _) in enumerate(self.moves, self.count):
                self._numbers[i] = start + source
        return self._sources


class Driver:
    """Driver calls of one GPU. Addresses are plain integers. `copy` and `operate` enqueue on the current stream. The
    calling thread must have used torch on the GPU before, which makes its context current."""

    def __init__(self, device: torch.device, words: int) -> None:
        """`device` has an index. `words`: size of the tensor that `overwrite` writes."""
        self._index = device.index
        try:
            library = ctypes.CDLL(LIBRARY)
            self._copy, self._operate = library.cuMemcpyAsync, library.cuStreamBatchMemOp_v2
        except (OSError, AttributeError) as error:
            raise CapabilityError(
                [f"the CUDA driver has no stream memory operations ({error}): choose collective.beside=nccl"]
            ) from error
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._operate.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32)
        self._copy_all = getattr(library, "cuMemcpyBatchAsync", None)
        """Available since CUDA 12.8. With one call per copy, eight GPUs are bound by their hosts."""
        if self._copy_all is not None:
            at, size = ctypes.c_void_p, ctypes.c_size_t
            self._copy_all.argtypes = (at, at, at, size, at, at, size, at, at)
        self._copying, self._first = _Copying(IN_STREAM_ORDER, flags=BESIDE_KERNELS), ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(0)
        # Allocated now: pinning memory is slow, and may block behind waits on the device.
        self._values = torch.zeros(words, dtype=torch.int32, pin_memory=True)
        # Streams of one priority share a few hardware queues; no waiting stream has this priority.
        self._side = torch.cuda.Stream(device, priority=-2)

    def copies(self, moves: Sequence[tuple[int, int, int]]) -> Copies:
        """Prepare copies for `copy` from (destination, source, bytes). The result is reusable."""
        return Copies([move for move in moves if move[2]])

    def copy(self, copies: Copies, start: int = 0) -> None:
        """Enqueue copies in any order: none may read what another writes. Sources are relative to `start`."""
        stream = self._stream()
        # The driver refuses batches on the default stream. Steps never run there.
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
        """Prepare operations for `operate` from (WAIT or WRITE, address of a word). The result is reusable."""
        return (_Operation * len(each))(*(_Operation(kind, address) for kind, address in each))

    def operate(self, operations: Any, value: int) -> None:
        """Enqueue operations in order, all with `value`. Writes become visible after all earlier work of the stream."""
        value &= 0xFFFFFFFF
        for operation in operations:
            operation.value = value
        status = self._operate(self._stream(), len(operations), ctypes.addressof(operations), 0)
        _check("cuStreamBatchMemOp", status)

    # Tensors made by a step are inference tensors; another thread may write to them only in inference mode.
    @torch.inference_mode()
    def overwrite(self, words: torch.Tensor, value: int) -> None:
        """Set all of int32 `words` on the GPU, even while its streams wait. May be called from any thread. The call
        blocks while another thread is in a synchronous driver call such as `.cpu()`. So a thread that waits for results
        which depend on these words must wait for an event."""
        self._values.fill_(value)
        with torch.cuda.stream(self._side):
            words.copy_(self._values, non_blocking=True)

    def _stream(self) -> int:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("copies between ranks are numbered on the host and cannot be captured in a CUDA graph")
        # Like `torch.cuda.current_stream` without a Stream object: called a thousand times per step.
        return torch._C._cuda_getCurrentRawStream(self._index)


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} failed with CUresult {status}")
