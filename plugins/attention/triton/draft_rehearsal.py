"""Steps that launch every kernel of attention for rows with drafts, which depends on the number of rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

from dovetail.core.ops.rehearsal import StepLimits, WarmupStep, running
from dovetail.plugins.attention.triton.tiles import Shape, Tile, Tiles


def request_steps(tiles: Tiles, shape: Shape, tokens: int, programs: float) -> None:
    """Request steps of rows with `tokens` tokens, one of which runs, if this is a rehearsal. `programs`: programs per
    SM for each row."""
    if tokens > 1 and (now := running()) is not None:
        now.steps.update(dict.fromkeys(drafted_steps(tiles, shape, tokens, programs, now.limits)))


def drafted_steps(tiles: Tiles, shape: Shape, tokens: int, programs: float, limits: StepLimits) -> Iterator[WarmupStep]:
    """Yield the step with the most rows for each kernel. Other arguments as in `request_steps`. Rows that have more
    tokens than any step verifies are those of a drafter's pass, which runs in each step with drafts."""
    found: dict[Hashable, int] = {}
    drafts = min(tokens - 1, limits.drafts)
    for rows in range(1, min(limits.rows, limits.tokens // (1 + drafts)) + 1):
        found[_kernel(tiles.decode(shape, tokens, rows * programs))] = rows
    context = min(limits.longest, 2)
    if drafts and context + drafts <= limits.longest:
        yield from (WarmupStep(rows * (1 + drafts), rows, rows, context, drafts) for rows in found.values())


def _kernel(tile: Tile) -> Hashable:
    """Return a tile without the fields that are no constants of its kernel."""
    return replace(tile, programs=0, least=0, root=0)
