"""How long the device was at work on each step, and how long it had nothing to do before. Nobody waits to find out."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event
"""A moment on the device."""


class StepClock:
    """On CUDA by events between the kernels, else by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last: Mark | None = None
        """When the step read last was done."""

    def mark(self) -> Mark:
        """The moment at which the device will have done what it was given until now."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, began: Mark, done: Mark) -> tuple[float, float]:
        """Seconds between the two marks of a step, and before its first one since the step before was done. Steps are
        read in their order, each when its marks have passed."""
        last, self._last = self._last, done
        return _seconds(began, done), 0.0 if last is None else max(_seconds(last, began), 0.0)


def _seconds(first: Mark, then: Mark) -> float:
    if isinstance(first, torch.cuda.Event):
        assert isinstance(then, torch.cuda.Event)
        return float(first.elapsed_time(then)) * 1e-3
    assert isinstance(then, float)
    return then - first
