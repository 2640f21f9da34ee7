"""Tuning contract: an operation whose launch depends on a choice that can be measured, such as a matmul's tile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Value = str | int | float | bool
Choice = Mapping[str, Value]
"""How an operation runs, as a flat JSON object; its operation gives it meaning. None in its place = the default, which
for a matmul is the library's kernel."""
Key = tuple[tuple[str, Value], ...]
"""Facts by which an operation chooses, besides the GPU and the number of rows: (name, value) pairs, sorted by name."""


def make_key(**facts: Value) -> Key:
    return tuple(sorted(facts.items()))


@dataclass(frozen=True, slots=True)
class Trials:
    """Several calls of one operation, each with its own weight, so that none of them finds its weight in the cache."""

    runs: Sequence[Callable[[], torch.Tensor]]
    """Each runs the operation as a step does, with the choices that are installed (core.ops.choices). Capturable."""
    exact: Callable[[], torch.Tensor]
    """Returns the result of the first run: numbers in float32, or whole numbers that are names, such as tokens."""
    before: Callable[[], object]
    """Launches a kernel like the one that precedes the operation in a step. A choice may gain by overlapping it."""
    reset: Callable[[], object] = lambda: None
    """Clears what a wrong choice may have left behind, such as counters."""
    tolerance: float = 1e-2
    """Maximum of ||y - exact|| / ||exact||; of the share of names that differ."""


class Tunable(ABC):
    """One operation for one number of rows. It describes shapes only: operands exist from `trials` on."""

    op: str
    """Name of the operation; a package's own begins with the package's name."""
    key: Key
    rows: int
    way: str = ""
    """Name of what the default does here, if it differs between operations of one key. It is kept with the timings."""
    nbytes: int
    """Bytes of weights that a call reads."""

    @abstractmethod
    def candidates(self) -> Iterable[Choice]:
        """Return the choices that may be fastest on the current GPU, the most promising first. The default is a
        candidate in any case."""

    def admits(self, choice: Choice) -> bool:
        """Return whether a choice that is fast with other numbers of rows can run with these."""
        return True

    @abstractmethod
    def trials(self, count: int) -> Trials:
        """Allocate operands with random values for `count` calls on the current GPU."""

    def kernel(self, choice: Choice) -> Hashable:
        """Return what identifies the compiled kernel of a choice. Operations of one kind whose choices have the same
        identity share it, so that it is compiled once."""
        return self.op, self.key, self.rows, tuple(sorted(choice.items()))

    def unlisted(self) -> Choice | None:
        """Return the choice that runs on the current GPU where no table has an entry; None = the default."""
        return None

    def predicted(self, choice: Choice | None) -> float | None:
        """Return the predicted seconds of a call on the current GPU; None = there is no prediction."""
        return None
