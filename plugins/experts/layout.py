"""Consecutive experts on each expert rank."""

from __future__ import annotations

from dovetail.core.errors import ConfigError


def consecutive(experts: int, rank: int, size: int) -> range:
    """Return the experts of a rank: as many on each. Raise ConfigError if `size` does not divide them."""
    if experts % size:
        works = [str(ranks) for ranks in range(1, experts + 1) if experts % ranks == 0]
        raise ConfigError(
            f"engine.ep={size} does not divide {experts} experts (null: as many as engine.tp). It must be one of "
            f"{', '.join(works)}; experts=tensor has some channels of each expert on every rank"
        )
    each = experts // size
    return range(rank * each, (rank + 1) * each)
