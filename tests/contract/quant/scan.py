"""Tunable operation of quantizers that the contract suite rejects."""

from __future__ import annotations

from dovetail.core.interfaces.tuning import Choice, Trials, Tunable, make_key


class Scan(Tunable):
    op, nbytes = "scan", 1

    def __init__(self, rows: int, width: float) -> None:
        self.rows, self.key = rows, make_key(width=width)

    def candidates(self) -> list[Choice]:
        return []

    def trials(self, count: int) -> Trials:
        raise AssertionError("the suite times nothing")
