"""What suites over tensors share: fresh random input, poisoned memory, and how near is near enough."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Greatest error of a row, relative to its norm, when sums run in float32 and only results are rounded."""


def fresh(suite: Any) -> None:
    """Seed torch's generator, once a suite object (pytest makes one for each test): anew, or with `suite.seed`, which a
    failure named."""
    if "_seeded" not in vars(suite):
        vars(suite)["_seeded"] = True
        if suite.seed is None:
            torch.seed()
        else:
            torch.manual_seed(suite.seed)


def fresh_random() -> random.Random:
    """Python's generator, seeded from torch's."""
    return random.Random(int(torch.randint(2**62, ())))


def row_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest ||got - expected|| / ||expected|| of a row (the last dimension); NaN where either has one."""
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)).max())


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str = "the result") -> None:
    """Every row within the tolerance. NaN is not near anything."""
    error = row_error(got, expected)
    assert error <= tolerance, (
        f"{what} is off by {error:.2e} of a row's norm, more than {tolerance:.0e} ({seed_note()})"
    )


def seed_note() -> str:
    return f"to see it again, set the suite's seed = {torch.initial_seed()}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes; unlike torch.equal, a NaN equals itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(x.detach().contiguous().flatten().view(torch.uint8) for x in (a, b)))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN or the greatest integer until they are written, so what a kernel leaves out shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
