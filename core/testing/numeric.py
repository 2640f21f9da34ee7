"""Helpers for suites over tensors: random input, poisoned memory, and tolerances."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Maximum error of a row relative to its norm, when sums run in float32 and only results are rounded."""


def fresh(suite: Any) -> None:
    """Seed torch's generator once per suite object (pytest makes one for each test), with `suite.seed` if it is set."""
    if "_seeded" not in vars(suite):
        vars(suite)["_seeded"] = True
        if suite.seed is None:
            torch.seed()
        else:
            torch.manual_seed(suite.seed)


def fresh_random() -> random.Random:
    """Return a Python generator seeded from torch's."""
    return random.Random(int(torch.randint(2**62, ())))


def row_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the maximum ||got - expected|| / ||expected|| over rows (last dimension), or NaN if either has one."""
    assert got.shape == expected.shape, f"expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)).max())


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str = "the result") -> None:
    """Assert that the error of every row is within the tolerance. NaN never is."""
    error = row_error(got, expected)
    assert error <= tolerance, f"{what}: relative error {error:.2e}, at most {tolerance:.0e} allowed ({seed_note()})"


def seed_note() -> str:
    return f"to reproduce, set the suite's seed = {torch.initial_seed()}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and bytes are equal. Unlike with torch.equal, a NaN equals itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(x.detach().contiguous().flatten().view(torch.uint8) for x in (a, b)))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new tensors with NaN or the maximum integer, so that a test sees what a kernel leaves unwritten."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
