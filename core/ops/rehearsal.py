"""Steps that run at start-up for the kernels that they launch, and not for their results.

Which kernel an operation launches may depend on its number of rows, by a rule or by tuned choices. Operations report
the rule during a rehearsal (`report_kernel`), and attention requests steps (`Rehearsal.steps`). Start-up then rehearses
the numbers of rows that bring a further kernel. This module does not import torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

Rule = Callable[[int], Hashable]
"""Returns what identifies the kernels of an operation with so many rows. It changes at any number of rows up to EACH,
and behind multiples of MULTIPLE above it."""
EACH, MULTIPLE = 1024, 64


class WarmupStep(NamedTuple):
    """Shape of one warm-up step: decode rows come first, the other rows are prompts."""

    tokens: int
    rows: int
    decodes: int = 0
    context: int = 0
    """Length of each decode row."""
    drafts: int = 0
    """Drafts that each row verifies; then all rows are decode rows."""
    cached: int = 0
    """Tokens of each prompt before its chunk."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of every step."""

    tokens: int
    rows: int
    longest: int
    """Tokens of the longest sequence."""
    drafts: int = 0
    """Drafts that a row verifies at most. A drafter's pass may feed more tokens of each row."""


@dataclass(slots=True)
class _Operation:
    rule: Rule
    of_samples: bool = False
    """Whether some step had as many rows of it as it samples, and more tokens."""
    most: int = 0
    """Rows of the largest call."""
    seen: set[Hashable] = field(default_factory=set)
    """Kernels that were launched."""
    shares: set[Fraction] = field(default_factory=set)
    """Rows of a call for each token of its step, of steps that do not sample all tokens."""
    unsure: set[Fraction] = field(default_factory=set)
    """Those of other steps, where rows may be sampled ones."""

    @property
    def sampled(self) -> bool:
        """Whether only sampled rows have it. A drafter may have a row for each sequence in one pass, and for each token
        in another."""
        return self.of_samples and Fraction(1) not in self.shares


@dataclass(slots=True)
class Rehearsal:
    limits: StepLimits
    steps: dict[WarmupStep, None] = field(default_factory=dict)
    """Steps that parts request, within the limits. Attention adds to them while a step runs."""
    _operations: dict[Hashable, _Operation] = field(default_factory=dict)
    _sizes: tuple[int, int] | None = None
    _ran: set[WarmupStep] = field(default_factory=set)

    def begin(self, step: WarmupStep | None) -> None:
        """Take the step that runs next; None = work that is no step, such as that of graphs."""
        self._sizes = None
        if step is not None:
            self._sizes = step.tokens, step.rows * (1 + step.drafts)
            self._ran.add(step)

    def report(self, key: Hashable, rows: int, rule: Rule) -> None:
        if (operation := self._operations.get(key)) is None:
            operation = self._operations[key] = _Operation(rule)
        operation.seen.add(rule(rows))
        if self._sizes is not None:
            tokens, samples = self._sizes
            operation.of_samples |= rows == samples != tokens
            operation.most = max(operation.most, rows)
            (operation.unsure if samples == tokens else operation.shares).add(Fraction(rows, tokens))

    def missing(self) -> list[WarmupStep]:
        """Return the steps that run the requested ones, and the kernels that no step has launched yet. Those that ran
        before are not among them."""
        wanted = dict.fromkeys(self.steps)
        for tokens in _covering(self._by_tokens()):
            wanted[self._chunks(tokens)] = None
        return [step for step in wanted if step not in self._ran]

    def missing_samples(self) -> list[int]:
        """Return the numbers of sampled rows that bring a further kernel."""
        found: dict[Hashable, set[int]] = {}
        for key, operation in self._operations.items():
            if operation.sampled:
                found |= {(key, kernel): rows for kernel, rows in self._unseen(operation).items()}
        return _covering(found)

    def _chunks(self, tokens: int) -> WarmupStep:
        return WarmupStep(tokens, -(-tokens // self.limits.longest))

    def _by_tokens(self) -> dict[Hashable, set[int]]:
        """Return the numbers of tokens of steps that launch each kernel that is missing."""
        found: dict[Hashable, set[int]] = {}
        for key, operation in self._operations.items():
            if operation.sampled:
                continue
            # Some shares are those of steps with drafts, which the requested steps do not have.
            shares = operation.shares or operation.unsure
            alike = shares & {Fraction(1)}
            for kernel, rows in self._unseen(operation).items():
                if possible := self._possible(rows, alike) or self._possible(rows, shares):
                    found[key, kernel] = possible
        return found

    def _possible(self, rows: Iterable[int], shares: Iterable[Fraction]) -> set[int]:
        """Return the numbers of tokens, of steps that did not run yet, with which a call may have so many rows."""
        counts = {int(count / share) for count in rows for share in shares}
        return {n for n in counts if 0 < n <= self.limits.tokens and self._chunks(n) not in self._ran}

    def _unseen(self, operation: _Operation) -> dict[Hashable, set[int]]:
        """Return the numbers of rows of each kernel that was not launched."""
        found: dict[Hashable, set[int]] = defaultdict(set)
        for rows in _distinct_rows(operation.most):
            if (kernel := operation.rule(rows)) not in operation.seen:
                found[kernel].add(rows)
        return found


def _distinct_rows(most: int) -> Iterable[int]:
    """Return numbers of rows up to `most` that have all kernels of a rule."""
    return sorted({*range(1, min(most, EACH) + 1), *range(MULTIPLE, most + 1, MULTIPLE), *([most] if most else [])})


def _covering(wanted: dict[Hashable, set[int]]) -> list[int]:
    """Return few numbers, at least one of each set: those that are in most sets first."""
    left, chosen = dict(wanted), []
    while left:
        counts: dict[int, int] = defaultdict(int)
        for numbers in left.values():
            for number in numbers:
                counts[number] += 1
        best = max(counts, key=lambda number: (counts[number], -number))
        chosen.append(best)
        left = {key: numbers for key, numbers in left.items() if best not in numbers}
    return chosen


_running: Rehearsal | None = None


@contextmanager
def rehearsal(limits: StepLimits) -> Iterator[Rehearsal]:
    """A block in which steps run for the kernels that they launch, and not for their results."""
    global _running
    before, _running = _running, Rehearsal(limits)
    try:
        yield _running
    finally:
        _running = before


def running() -> Rehearsal | None:
    """Return the rehearsal that runs, if any."""
    return _running


def rehearsing() -> bool:
    return _running is not None


def report_kernel(key: Hashable, rows: int, rule: Rule) -> None:
    """Report, in a call with `rows` rows, how an operation's kernels depend on them. `key`: everything else that they
    depend on. Outside rehearsals this does nothing. An operation that launches the same kernels for all numbers of rows
    need not call it."""
    if _running is not None:
        _running.report(key, rows, rule)
