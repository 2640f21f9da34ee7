"""Times of kernels in CUDA graphs, and the timer of a search."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dovetail.core.errors import one_line
from dovetail.core.interfaces.tuning import Choice, Key, Trials, Tunable
from dovetail.core.ops.choices import Choices, temporarily
from dovetail.core.ops.compile_ahead import compile_ahead
from dovetail.core.ops.compile_server import pack, unpack

log = logging.getLogger(__name__)

ROTATED_BYTES = 200 << 20
"""Operands are copied until they total more than this, several times the L2 cache."""


def copies(nbytes: int) -> int:
    """Return how many copies of an operand of `nbytes` to rotate through, so that none is found in the L2 cache."""
    return max(2, -(-ROTATED_BYTES // nbytes))


@cache
def _stream() -> torch.cuda.Stream:
    """One stream for all captures: graphs that share a memory pool reuse memory of the same stream only."""
    return torch.cuda.Stream()


def capture(run: Callable[[], object], pool: tuple[int, int] | None = None) -> torch.cuda.CUDAGraph:
    """Record a graph of `run`, which must have run before.

    torch.cuda.graph would collect garbage and empty the allocator's cache each time; searches capture thousands.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(_stream()):
        graph.capture_begin(*(() if pool is None else (pool,)))
        try:
            run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(_stream())
    return graph


LAUNCH_CYCLES = 150_000
"""Clock cycles, about 100 us, that the GPU waits before a replay: longer than the host takes to submit it, which would
otherwise be part of the time of a short graph."""


def medians(graphs: Sequence[torch.cuda.CUDAGraph], repeats: int) -> list[float]:
    """Return the median microseconds of a replay of each graph. They are replayed in turn, since clocks drift."""
    times: list[list[float]] = [[] for _ in graphs]
    for graph in graphs:
        graph.replay()
    for _ in range(repeats):
        for graph, found in zip(graphs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(LAUNCH_CYCLES)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3)
    return [statistics.median(found) for found in times]


class GraphTimer:
    """Timer of a search (core.tuning.search.Timer) on the current GPU."""

    BRIEF, LONG = 3, 9
    """Replays of a graph."""

    _tunable: Tunable
    _trials: Trials
    _before: torch.cuda.CUDAGraph
    """The preceding kernels alone. It keeps the memory pool of the other graphs."""

    def __init__(self, gpu: str, workers: int) -> None:
        """`gpu`: name of the GPU. `workers`: processes that compile."""
        self.gpu, self._workers = gpu, workers
        self._exact: torch.Tensor | None = None

    def open(self, tunable: Tunable) -> None:
        self.close()
        self._tunable, self._trials = tunable, tunable.trials(copies(tunable.nbytes))
        before, count = self._trials.before, len(self._trials.runs)
        before()
        self._before = capture(lambda: [before() for _ in range(count)])

    def close(self) -> None:
        """Free the operands."""
        self._exact = None
        for name in ("_trials", "_before"):
            vars(self).pop(name, None)

    def compile_all(self, jobs: Sequence[tuple[Tunable, Choice]], seconds: float | None) -> list[bool]:
        """Compile into Triton's cache on disk, in processes: threads would wait for each other's Python code."""
        count = min(self._workers, len(jobs))
        context, device = multiprocessing.get_context("spawn"), torch.cuda.current_device()
        end = None if seconds is None else time.time() + seconds
        done = context.Array("b", len(jobs))
        # In a file: `start` waits while a process reads arguments longer than a pipe holds, and it imports torch first.
        with tempfile.NamedTemporaryFile() as packed:
            packed.write(pack(list(jobs)))
            packed.flush()
            workers = [
                context.Process(
                    target=_compile_share, args=(self.gpu, device, packed.name, share, count, end, done), daemon=True
                )
                for share in range(count)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(None if end is None else max(0.0, end - time.time()))
            codes = [worker.exitcode for worker in workers]
            for worker in workers:
                worker.kill()
        compiled = [bool(done[i]) for i in range(len(jobs))]
        if failed := [code for code in codes if code]:
            what = f"{len(failed)} of the {count} processes that compile kernels died (exit code {failed[0]})"
            if not any(compiled):
                raise RuntimeError(
                    f"{what}, and none compiled one; their output states why. A script that starts a search needs "
                    '`if __name__ == "__main__":`, since each process imports it'
                )
            log.warning("%s: %d of %d kernels are not timed", what, compiled.count(False), len(jobs))
        return compiled

    def microseconds(self, choices: Sequence[Choice | None], final: bool) -> list[float | None]:
        if not final:
            (alone,) = medians([self._before], self.LONG)
            return [self._brief(choice, alone) for choice in choices]
        graphs = [self._captured(choice) for choice in choices]
        alone, *times = medians([self._before, *(graph for graph in graphs if graph is not None)], self.LONG)
        following = iter(times)
        return [None if graph is None else self._per_call(next(following), alone) for graph in graphs]

    def fault(self, choice: Choice) -> str | None:
        with self._choosing(choice):
            if self._exact is None:
                self._exact = self._trials.exact()
            found = fault_of(self._trials.runs[0], self._exact, self._trials.tolerance)
        self._trials.reset()
        return found

    def _choosing(self, choice: Choice | None) -> AbstractContextManager[None]:
        # As a table would say it. An operation may run something else than its default where there is no entry.
        at = self._tunable.op, self.gpu, self._tunable.key
        entries: dict[tuple[str, str, Key], Any] = {at: {self._tunable.rows: choice}}
        return temporarily(Choices(entries))

    def _brief(self, choice: Choice | None, alone: float) -> float | None:
        graph = self._captured(choice)
        return None if graph is None else self._per_call(medians([graph], self.BRIEF)[0], alone)

    def _per_call(self, us: float, alone: float) -> float | None:
        """Return the time that a call adds to the kernel in front of it; None if that one took longer."""
        return (us - alone) / len(self._trials.runs) if us > alone else None

    def _captured(self, choice: Choice | None) -> torch.cuda.CUDAGraph | None:
        """Return a graph of all runs with this choice; None if it cannot run."""

        def chain() -> None:
            for run in self._trials.runs:
                self._trials.before()
                run()

        try:
            with self._choosing(choice):
                self._trials.runs[0]()
                return capture(chain, self._before.pool())
        except Exception as error:  # a choice that does not fit this GPU is no candidate
            torch.cuda.synchronize()
            log.debug("%s %s cannot run: %s", self._tunable.op, choice, one_line(str(error)))
            return None


def _compile_share(
    gpu: str,
    device: int,
    packed: str,
    share: int,
    count: int,
    end: float | None,
    done: Any,
) -> None:
    """Entry point of a process that compiles every `count`-th job of the file `packed` and marks it as done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and that ends this process.
    torch.cuda.set_device(device)
    timer = GraphTimer(gpu, 1)
    jobs: list[tuple[Tunable, Choice]] = unpack(Path(packed).read_bytes())
    with torch.inference_mode():
        for i in range(share, len(jobs), count):
            if end is not None and time.time() > end:
                return
            timer.close()
            timer._tunable, choice = jobs[i]
            try:
                timer._trials = timer._tunable.trials(1)
                with compile_ahead(1, ignore_errors=True), timer._choosing(choice):
                    timer._trials.runs[0]()
            except Exception as error:  # found again when it is timed
                log.debug("%s %s does not compile: %s", timer._tunable.op, choice, one_line(str(error)))
            done[i] = 1


def fault_of(run: Callable[[], torch.Tensor], exact: torch.Tensor, tolerance: float) -> str | None:
    """Run twice and return the fault in the results, None if there is none. The second run also finds counters that the
    first one did not leave at zero. The error of numbers is relative, in the 2-norm; that of whole numbers, which are
    names (of tokens), is the share of those that differ."""
    first, second = run(), run()
    for result in (first, second):
        if result.is_floating_point():
            error = float((result.float() - exact).norm() / exact.norm())
        else:
            error = float((result != exact).float().mean())
        if not error < tolerance:
            return f"off by {error:.1e}"
    return None if torch.equal(first, second) else "not the same bits twice"
