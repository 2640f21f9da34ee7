"""Rank processes for suites: each imports a suite from its file, and all run one of its methods concurrently.

Processes are started once and reused, since importing torch would dominate the time of a small test. For a suite whose
`device` is "cuda", rank n uses GPU n.
"""

from __future__ import annotations

import atexit
import importlib.util
import inspect
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

_GRACE = 10.0
"""Seconds that the other ranks have to finish after one has failed."""


@dataclass(frozen=True)
class SuiteAt:
    """Location of a suite for another process. Only pytest can import test modules by their names."""

    file: str
    module: str
    qualname: str
    attributes: dict[str, Any]
    """Attributes of the suite object."""

    @classmethod
    def of(cls, suite: object) -> SuiteAt:
        kind = type(suite)
        if "<locals>" in kind.__qualname__:
            name = kind.__qualname__
            raise ValueError(f"{name} is local to a function, so no other process can import it: define it in a module")
        return cls(inspect.getfile(kind), kind.__module__, kind.__qualname__, dict(vars(suite)))

    def load(self) -> Any:
        name = "__mp_main__" if self.module == "__main__" else self.module
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, self.file)
            assert spec is not None and spec.loader is not None, self.file
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        kind: Any = sys.modules[name]
        for part in self.qualname.split("."):
            kind = getattr(kind, part)
        suite = kind.__new__(kind)
        vars(suite).update(self.attributes)
        return suite


class RankFailed(AssertionError):
    """A rank raised an error, exited or timed out."""


@dataclass
class _Pool:
    processes: list[BaseProcess]
    connections: list[Connection]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for connection in self.connections:
            connection.close()


_pools: dict[int, _Pool] = {}


def on_ranks(suite: object, method: str, size: int, *, timeout: float = 150, may_die: Sequence[int] = ()) -> list[Any]:
    """Run `suite.method(rank, size, address)` on `size` processes and return the results. `address` has a free port.

    Raise RankFailed with the message of the first failed rank. A rank in `may_die` may exit; its result is None.
    """
    pool = _pools.get(size) or _started(size)
    order = SuiteAt.of(suite), method, f"127.0.0.1:{_free_port()}"
    for connection in pool.connections:
        connection.send(order)
    answers: dict[int, tuple[bool, Any]] = {}
    died = False
    deadline = time.monotonic() + timeout
    while len(answers) < size:
        waiting = {c: rank for rank, c in enumerate(pool.connections) if rank not in answers}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in [c for c in waiting if c in ready]:
            rank = waiting[connection]
            try:
                answers[rank] = connection.recv()
            except (EOFError, ConnectionResetError):
                died = True
                answers[rank] = (rank in may_die, None if rank in may_die else "the process exited")
            if not answers[rank][0]:
                deadline = min(deadline, time.monotonic() + _GRACE)
    if died or len(answers) < size:
        _pools.pop(size).stop()
    for rank, (good, answer) in answers.items():
        if not good:
            raise RankFailed(f"rank {rank} of {size}: {answer}")
    late = [rank for rank in range(size) if rank not in answers]
    if late:
        raise RankFailed(f"ranks {late} of {size} did not finish {method} within {timeout:g} s")
    return [answers[rank][1] for rank in range(size)]


def _started(size: int) -> _Pool:
    context = multiprocessing.get_context("spawn")
    pool = _Pool([], [])
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, rank, size), daemon=True)
        process.start()
        theirs.close()
        pool.processes.append(process)
        pool.connections.append(ours)
    _pools[size] = pool
    return pool


def _serve(connection: Connection, rank: int, size: int) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            where, method, address = connection.recv()
        except (EOFError, KeyboardInterrupt):
            os._exit(0)
        try:
            suite = where.load()
            if torch.device(getattr(suite, "device", "cpu")).type == "cuda":
                torch.cuda.set_device(rank)
            answer = True, getattr(suite, method)(rank, size, address)
        except KeyboardInterrupt:
            os._exit(1)
        except BaseException as error:  # pytest.fail raises no Exception.
            answer = False, f"{error}\n{''.join(traceback.format_exception(error))}"
        connection.send(answer)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@atexit.register
def _stop_all() -> None:
    while _pools:
        _pools.popitem()[1].stop()
