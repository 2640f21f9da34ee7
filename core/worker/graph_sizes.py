"""Steps that get a CUDA graph: numbers of rows and tokens, and the largest step that each graph serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dovetail.core.ops.latents import absorbed_excess, expands
from dovetail.core.worker.row_sections import GraphSections

if TYPE_CHECKING:
    from dovetail.core.compose import EngineConfig
    from dovetail.core.interfaces import ModelSpec
    from dovetail.core.interfaces.model import MLA
    from dovetail.core.interfaces.plan import StepShape

LEAST_TOKENS, MOST_TOKENS = 2048, 4096
"""Range of `engine.graph_tokens` if it is null."""
TILE = 256
"""Tokens of the largest tiles of matmuls."""
LAUNCH_WORK = 2e12
"""Operations of a layer's matmuls that a GPU computes while a host launches the layer without a graph: 1.0 to 1.8 ms,
as measured beside an H200, at its rate in FP8."""
MOST_PAIRS = 3 << 22
"""Limit for a step that runs as a graph: tokens of chunks times the keys of their rows. Larger steps take longer than
their launches, and attention, much of their time, is faster with exact lengths: a prompt of 4096 tokens of an 8B model
in FP8 took 65 ms as a graph and 60 without on an H200."""
ABSORBED_WORK = 2e11
"""Operations that absorbed attention over latents may take more than expanded attention in a layer of a graph: a third
of a millisecond on an H200 in bfloat16, where the launches of a layer take 1.0 to 1.8."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Largest step that one graph of the layers serves."""

    tokens: int
    decodes: int
    """Decode rows."""
    chunks: int
    """Rows that feed prompts; 0 = the graph is for decode steps."""
    samples: int
    """Rows that sample."""
    width: int
    """W."""
    ragged: bool = False
    """Decode rows feed up to W tokens each; False = exactly W in decode steps."""
    adapted: bool = False
    """Rows may have adapters."""
    follows: bool = True
    """Whether the drafter feeds chunks of prompts to its own layers."""

    @property
    def rows(self) -> int:
        return self.decodes + self.chunks

    @property
    def sections(self) -> GraphSections:
        return GraphSections(self.decodes, self.chunks, self.samples, self.ragged)

    @property
    def follow(self) -> bool:
        """FedTokens.follow"""
        return self.chunks > 0 and self.follows

    @property
    def drafts(self) -> bool:
        """Whether the graph begins with the drafter's work."""
        return self.width > 1 and not self.chunks and not self.ragged


class DrawSize(NamedTuple):
    """Rows and positions of one graph that draws."""

    width: int
    """W: most positions of a row."""
    rows: int
    tokens: int = 0
    """Positions of all rows together; 0 = each row has W."""


def most_graph_tokens(engine: EngineConfig, spec: ModelSpec) -> int:
    """Return the tokens of the largest step with prompt tokens that gets a graph, at most the token budget."""
    most = engine.graph_tokens
    if most is None:
        most, weights = LEAST_TOKENS, spec.parameters
        if weights is not None:
            of_layer = (weights.attention + weights.mlp + weights.active_experts) / spec.layers / engine.tp
            found = int(LAUNCH_WORK / max(1.0, 2 * of_layer)) // TILE * TILE
            # Graphs attend to latents without expanding them: a step that takes longer than its launches is better off
            # without one.
            most = min(MOST_TOKENS, max(LEAST_TOKENS if spec.mla is None else TILE, found))
        if engine.overlap_tokens:
            # Steps of two half-batches have no graph.
            most = min(most, max(LEAST_TOKENS, (engine.overlap_tokens - 1) // TILE * TILE))
    return min(most, engine.token_budget)


@dataclass(frozen=True, slots=True)
class PairLimit:
    """Which steps have too many pairs of a prompt token and a key for a graph."""

    mla: MLA | None = None
    heads: int = 1
    """Query heads of a rank."""

    def __call__(self, shape: StepShape) -> bool:
        """Whether the step is better off without a graph."""
        most = MOST_PAIRS
        if self.mla is not None and shape.chunks and expands(self.mla, (shape.tokens - shape.decodes) // shape.chunks):
            most = min(most, int(ABSORBED_WORK / (2 * self.heads * absorbed_excess(self.mla))))
        return shape.pairs > most


def batch_sizes(most: int) -> list[int]:
    """Return the numbers of rows that get a graph. Padding is less than two fifths of the rows, above 8 rows less than
    a third. Sizes above 128 are multiples of matmul tiles: a partly filled tile costs as much as a full one."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (64 if sizes[-1] < 512 else 128))
    return [*(size for size in sizes if size < most), most]


def token_sizes(most: int) -> list[int]:
    """Token counts of mixed steps with a graph: multiples of matmul tiles, but for small, weight-bound steps. Above
    1024 tokens, at most an eighth is padding."""
    sizes = [16, 32, 64]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (64 if sizes[-1] < 512 else 128 if sizes[-1] < 2048 else 256))
    return [*(size for size in sizes if size < most), most] if most else []


def ragged_sizes(most_rows: int, lookahead: int, *, few: bool = False) -> list[int]:
    """Token counts of graphs for decode steps in which rows verify unlike numbers of drafts. Padding is at most a third
    of the tokens. Smaller steps are weight-bound: to verify all drafts takes no longer than some. `few`: to make them
    does, so that every step in which no row has all drafts gets such a graph."""
    sizes, most = [16], most_rows * (1 + lookahead)
    while sizes[-1] < most:
        sizes.append(sizes[-1] * 3 // 2 if sizes[-1].bit_count() == 1 else sizes[-1] * 4 // 3)
    sizes = [size for size in sizes if size < most] if lookahead else []
    if few:
        sizes = [*(size for size in (4, 8) if size < most), *sizes]
        if not sizes or sizes[-1] < most_rows * lookahead:
            sizes.append(most_rows * lookahead)
    return sizes


def graph_sizes(most_rows: int, most_tokens: int, lookahead: int, *, few: bool = False) -> list[int]:
    """Return the numbers of tokens of all steps that get a graph. `few`: as in `ragged_sizes`."""
    sizes = {size * width for size in batch_sizes(most_rows) for width in (1, 1 + lookahead)}
    if most_tokens:
        sizes |= {*token_sizes(most_tokens), *ragged_sizes(most_rows, lookahead, few=few)}
    return sorted(sizes)
