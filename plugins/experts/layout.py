"""Consecutive experts on each expert rank."""

from __future__ import annotations

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import ExpertPlacement
from dovetail.plugins.experts.config import SpreadConfig


class Consecutive(ExpertPlacement):
    """Placement whose ranks have equally many experts, and `redundant` copies over all of them."""

    config: SpreadConfig

    def __init__(self, config: SpreadConfig) -> None:
        super().__init__(config)
        self.rebalance = config.rebalance

    def layout(self, experts: int, rank: int, size: int) -> list[int]:
        """A rank's slots for copies have the experts of the ranks after it, until loads are known."""
        slots = _slots(experts, self.config.redundant, size)
        start = rank * experts // size
        return [expert % experts for expert in range(start, start + slots)]


def _slots(experts: int, redundant: int, size: int) -> int:
    """Return the number of slots of a rank. Raise ConfigError if the experts and their copies do not fill the ranks."""
    if redundant and size == 1:
        raise ConfigError(
            f"experts.redundant={redundant} makes copies of experts for other ranks, and engine.ep=1. Set "
            "experts.redundant=0, or engine.ep to at least 2 (by default it is engine.tp)"
        )
    if (experts + redundant) % size:
        less = (experts + redundant) // size * size - experts
        numbers = [str(number) for number in (less, less + size) if 0 <= number <= experts * (size - 1)]
        fewest = 2 if redundant else 1
        works = [str(ranks) for ranks in range(fewest, size) if not (experts + redundant) % ranks and not size % ranks]
        copies = f" and experts.redundant={redundant} copies" if redundant else ""
        sizes = f"With as many ranks, engine.ep={', '.join(works)} would work; or set" if works else "Set"
        raise ConfigError(
            f"engine.ep={size} (by default engine.tp) does not divide the model's {experts} experts{copies}. {sizes} "
            f"experts.redundant to {' or '.join(numbers)}; experts=tensor has some channels of each expert on every "
            "rank"
        )
    if redundant > experts * (size - 1):
        raise ConfigError(
            f"experts.redundant={redundant} is more than one copy of each of {experts} experts on each of "
            f"engine.ep={size} groups of ranks: it must be at most {experts * (size - 1)}"
        )
    return (experts + redundant) // size
