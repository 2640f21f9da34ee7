"""Options of the built-in placements."""

from __future__ import annotations

from pydantic import Field

from dovetail.core.compose import Config


class TensorConfig(Config):
    """Every rank has some channels of each expert, and multiplies every row."""


class SpreadConfig(Config):
    """Options of placements in which ranks have different experts."""

    redundant: int = Field(0, ge=0)
    """Number of slots for further copies of experts, over all `engine.ep` groups. Tokens take the copies of an expert
    in turn. The model's experts and these together must be a multiple of `engine.ep`. Each takes the memory of an
    expert in every layer."""
    rebalance: int = Field(0, ge=0)
    """Number of steps after which the loads of experts are compared, and experts move to other ranks and into the slots
    for copies; 0 = never."""


class WholeConfig(SpreadConfig):
    """Ranks have different experts. Every rank has all rows; the next sum over ranks adds the experts' outputs."""


class GatherConfig(SpreadConfig):
    """Ranks have different experts. Every rank gives its own rows to the layer, gathers all rows, and gets the sums of
    its own ones."""


class AllToAllConfig(SpreadConfig):
    """Ranks have different experts. Rows go to the ranks that have their experts, and the sums return."""

    capacity: float = Field(1.25, gt=0)
    """Rows that the first round can send to each rank, as a multiple of those that uniform routing sends. The others go
    in a second round."""
    check_rows: int = Field(4096, ge=1)
    """Minimum number of rows of a step for which the host reads whether any rank needs the second round. Smaller steps,
    and CUDA graphs, always have both."""
