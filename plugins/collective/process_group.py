"""A private process group. torch.distributed's global state belongs to the calling program."""

from __future__ import annotations

import ipaddress
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dovetail.core.errors import CapabilityError

_POLL = 0.005


class Rendezvous:
    """Connects the ranks. Rank 0 polls in a loop that `abort` ends, since a rank may die before it connects."""

    def __init__(self) -> None:
        self._aborted = threading.Event()
        self.store: Any = None
        """Store shared by the ranks; set by `meet`."""

    def abort(self) -> None:
        """End `meet`. May be called from any thread."""
        self._aborted.set()

    def meet(self, rank: int, size: int, address: str, device: torch.device, timeout: timedelta) -> Any:
        """Return a process group of all ranks: NCCL's for a CUDA device, gloo's for the CPU."""
        make = _backend(device)
        host, _, port = address.rpartition(":")
        store = dist.TCPStore(host, int(port), size, rank == 0, timeout=timeout, wait_for_workers=False)
        store.set(f"here/{rank}", "")
        deadline = time.monotonic() + timeout.total_seconds()
        while rank == 0 and (missing := [other for other in range(size) if not store.check([f"here/{other}"])]):
            names = ", ".join(map(str, missing))
            if self._aborted.wait(_POLL):
                raise RuntimeError(f"a rank died before all ranks were connected; missing: {names}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{size} ranks should connect to {address} within {timeout}; missing: {names}")
        self.store = store
        return make(dist.PrefixStore("group", store), rank, size, host, timeout)


def _backend(device: torch.device) -> Any:
    if device.type == "cuda":
        if not dist.is_nccl_available():
            raise CapabilityError([f"this build of torch {torch.__version__} has no NCCL, which {device} needs"])
        return _nccl
    if device.type == "cpu":
        if not dist.is_gloo_available():
            raise CapabilityError([f"this build of torch {torch.__version__} has no gloo, which the CPU needs"])
        return _gloo
    raise CapabilityError([f"the built-in collectives serve cuda and cpu, not {device}: choose another collective"])


def _gloo(store: Any, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    make: Any = dist.ProcessGroupGloo
    options = make._Options()
    # By default gloo takes the interface that the host name resolves to, which may be unreachable.
    local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    options._devices = [make.create_device(hostname=host) if local else make.create_default_device()]
    options._timeout = timeout
    return make(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
