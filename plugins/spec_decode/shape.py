"""Trees of a fixed shape, chosen by how often drafts of each rank are accepted (Sequoia, Chen et al. 2024). Imports no
torch."""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dovetail.core.errors import ConfigError, shown
from dovetail.core.interfaces.spec_decode import MOST_NODES

Ranks = Sequence[Sequence[float]]
"""Share by level and rank: how often the draft of this rank is accepted if its parent was. The last level serves all
deeper ones."""

TYPICAL_RANKS: Ranks = ((0.6, 0.15, 0.07, 0.04, 0.03, 0.02, 0.01, 0.01),)
"""A drafter that accepts 60 % of its first drafts, and of further ones a share that falls with about the square of the
rank, for drafters that were not measured."""


class RankFile(BaseModel):
    """Content of a file of measured ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ranks: tuple[tuple[float, ...], ...] = Field(min_length=1, max_length=64)
    """Ranks."""
    drafter: str = ""
    """Composition that was measured."""
    drafts: int = 0
    """Number of drafts of the first level that were counted."""


def read_ranks(path: str) -> Ranks:
    """Read a file of measured ranks. Raises ConfigError for one that is missing or wrong."""
    name = f"spec_decode.tree_shape={shown(Path(path))}"
    try:
        text = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{name}: {error.strerror or error}. Set it to joint, sequoia, or a file that "
            "benchmarks/draft_ranks.py wrote"
        ) from None
    try:
        ranks = RankFile.model_validate_json(text).ranks
    except ValidationError as error:
        raise ConfigError(f"{name}: no file of ranks: {error.errors()[0]['msg']}") from None
    for level, of_level in enumerate(ranks, 1):
        if not of_level or not all(0 <= share <= 1 for share in of_level) or sum(of_level) > 1 + 1e-6:
            raise ConfigError(
                f"{name}: level {level} has the shares {list(of_level)}: they must be from 0 to 1, and at most 1 "
                "together"
            )
    return ranks


def write_ranks(path: Path, ranks: Ranks, drafter: str, drafts: int) -> None:
    """Write a file that `read_ranks` reads."""
    rounded = [[round(share, 5) for share in level] for level in ranks]
    path.write_text(json.dumps({"ranks": rounded, "drafter": drafter, "drafts": drafts}, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree without tokens. Drafts are in the order of their expected acceptance, so parents precede children."""

    parents: tuple[int, ...]
    """Index of each draft's parent; -1 = the row's last token."""
    ranks: tuple[int, ...]
    """Index of each draft among its siblings."""
    expected: tuple[float, ...]
    """How often each draft is accepted, by the ranks from which the shape was chosen."""

    @property
    def levels(self) -> tuple[int, ...]:
        """Level of each draft; those of the row's last token have 1."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent < 0 else found[parent] + 1)
        return tuple(found)


def best_shape(ranks: Ranks, drafts: int, depth: int) -> Shape:
    """Return the tree with the most accepted drafts, for at most `drafts` drafts in `depth` levels.

    A draft is accepted as often as the product of the ranks along its path. Where later siblings are accepted at most
    as often as earlier ones, the most often accepted drafts are a tree, and Sequoia's dynamic program finds no better
    one. A rank that was measured as better than the one before it counts as equal."""
    falling = [tuple(accumulate(level, min)) for level in ranks]
    parents: list[int] = []
    chosen: list[int] = []
    expected: list[float] = []

    def candidate(parent: int, rank: int, level: int, reached: float) -> tuple[float, int, int, int, float] | None:
        shares = falling[min(level, len(falling)) - 1]
        if level > depth or rank >= len(shares) or shares[rank] <= 0:
            return None
        return -reached * shares[rank], parent, rank, level, reached

    heap = [first for first in (candidate(-1, 0, 1, 1.0),) if first is not None]
    while heap and len(parents) < drafts:
        negative, parent, rank, level, reached = heapq.heappop(heap)
        own = len(parents)
        parents.append(parent)
        chosen.append(rank)
        expected.append(-negative)
        for more in (candidate(parent, rank + 1, level, reached), candidate(own, 0, level + 1, -negative)):
            if more is not None:
                heapq.heappush(heap, more)
    return Shape(tuple(parents), tuple(chosen), tuple(expected))


def shape_of(tree_shape: str, drafts: int, depth: int) -> Shape:
    """Return the shape that an option `tree_shape` selects, which is not "joint". Raises ConfigError if ranks leave no
    tree of so many drafts and levels."""
    ranks = TYPICAL_RANKS if tree_shape == "sequoia" else read_ranks(tree_shape)
    shape = best_shape(ranks, min(drafts, MOST_NODES), depth)
    name = f"spec_decode.tree_shape={shown(Path(tree_shape))}"
    if (found := len(shape.parents)) < drafts:
        raise ConfigError(
            f"{name}: ranks with a share above 0 make {found} drafts in {depth} levels, fewer than tree={drafts}: set "
            f"spec_decode.tree={found} or less, or more levels (spec_decode.lookahead)"
        )
    return shape
