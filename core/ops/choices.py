"""Installed choices of tuned operations (core.tuning): which tile a matmul uses, for instance.

Start-up installs them once per rank, before kernels compile. An engine that starts later in the same process replaces
them, also for steps of an earlier engine that run without a graph. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from dovetail.core.interfaces.tuning import Choice, Key

FEW_ROWS = 16
"""Rows up to which a choice serves all smaller numbers, since the tensor cores multiply no fewer."""


def far_below(rows: int, least: int) -> bool:
    """Whether the least entry of a shape, for `least` rows, is for too many rows to serve `rows`. Start-up gives them a
    choice of their own (core.tuning.startup.predicted_table)."""
    return least > FEW_ROWS and 2 * rows <= least


@dataclass(frozen=True, eq=False)
class Choices:
    """Choices by (operation, GPU, key) and maximum number of rows, in ascending order of rows."""

    entries: Mapping[tuple[str, str, Key], Mapping[int, Choice | None]] = field(default_factory=dict)

    def tuned(self, op: str, gpu: str, key: Key) -> bool:
        """Whether there are entries. Without them an operation chooses by itself."""
        return (op, gpu, key) in self.entries

    def serves(self, op: str, gpu: str, key: Key, rows: int) -> bool:
        """Whether an entry serves `rows`, if only to say that the default is fastest."""
        return any(rows <= most for most in self.entries.get((op, gpu, key), {}))

    def find(self, op: str, gpu: str, key: Key, rows: int) -> Choice | None:
        """Return the choice with the least maximum that serves `rows`; None = the operation's default."""
        serving = self.entries.get((op, gpu, key), {})
        return next((choice for most, choice in serving.items() if rows <= most), None)

    def turns(self) -> list[int]:
        """Return the maximum rows at which some operation's choice ends: one more row may need another kernel."""
        found = set()
        for rows in self.entries.values():
            ordered = list(rows.items())
            for (most, choice), (_, following) in zip(ordered, [*ordered[1:], (0, None)], strict=True):
                if choice != following:
                    found.add(most)
        return sorted(found)


_installed = Choices()


def installed() -> Choices:
    return _installed


def install(choices: Choices) -> None:
    global _installed
    _installed = choices


@contextmanager
def temporarily(choices: Choices) -> Iterator[None]:
    """Install choices for a block."""
    before = installed()
    install(choices)
    try:
        yield
    finally:
        install(before)
