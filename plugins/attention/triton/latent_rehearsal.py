"""Steps that launch every kernel of attention over latents. Which ones run depends on the tokens and lengths of rows,
and the number of heads that are expanded at a time is a constant of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

from dovetail.core.arithmetic import ceil_div
from dovetail.core.ops.rehearsal import StepLimits, WarmupStep
from dovetail.plugins.attention.triton.gather import PAGE
from dovetail.plugins.attention.triton.tiles import SHORT_PROMPT


def absorbed_steps(
    limits: StepLimits, most_tokens: int, tile: Callable[[int, int], Hashable]
) -> Iterator[tuple[Hashable, WarmupStep]]:
    """Yield a step of absorbed rows for each tile. `most_tokens`: tokens of a row up to which it is absorbed.
    tile(rows, tokens): the tile of so many rows with so many tokens together."""
    found = set()
    for rows in _doubled(min(limits.rows, limits.tokens)):
        for each in _doubled(min(most_tokens, limits.tokens // rows, limits.longest)):
            if (key := tile(rows, rows * each)) not in found:
                found.add(key)
                yield key, WarmupStep(rows * each, rows)


def decoded_steps(limits: StepLimits, tile: Callable[[int], Hashable | None]) -> Iterator[tuple[Hashable, WarmupStep]]:
    """Yield a step for each tile that rows of one token alone have. tile(rows): that of so many of them; None = it is
    one of `absorbed_steps`."""
    found: set[Hashable] = {None}
    for rows in _doubled(min(limits.rows, limits.tokens) - 1):
        if (key := tile(rows)) not in found:
            found.add(key)
            # The last row of a step is a prompt.
            yield key, WarmupStep(rows + 1, rows + 1, rows, min(limits.longest, 2))


def expanded_steps(
    limits: StepLimits,
    least_tokens: int,
    heads: Sequence[int],
    most_pages: Callable[[int], int],
    tile: Callable[[int, int], Hashable],
) -> Iterator[tuple[Hashable, WarmupStep]]:
    """Yield a step of expanded rows for each number of heads at a time and each tile. `least_tokens`: tokens of a row
    from which it is expanded. `heads`: numbers of heads, in descending order. most_pages(heads): pages of PAGE keys
    that fit beside so many heads. tile(rows, tokens): as in `absorbed_steps`."""
    found, fits_more = set(), 0
    for count in heads:
        fits = most_pages(count)
        for each in (least_tokens, max(least_tokens, SHORT_PROMPT + 1)):
            rows = _rows(limits, each, fits_more, fits)
            key = count, tile(rows, rows * each)
            if rows and key not in found:
                found.add(key)
                length = min(fits // rows * PAGE, limits.longest)
                yield key, WarmupStep(rows * each, rows, cached=length - each)
        fits_more = fits


def _rows(limits: StepLimits, each: int, more_than: int, fits: int) -> int:
    """Return the least number of equally long rows of `each` tokens or more whose pages are within the bounds; 0 = no
    number can be."""
    for rows in range(1, min(limits.rows, limits.tokens // each) + 1):
        pages = min(fits // rows, ceil_div(limits.longest, PAGE))
        # All but the last page of a row are full, unless it has the greatest length.
        if rows * pages > more_than and min(pages * PAGE, limits.longest) >= each:
            return rows
    return 0


def _doubled(most: int) -> Iterator[int]:
    """Yield powers of two below `most`, and `most`."""
    size = 1
    while size < most:
        yield size
        size *= 2
    if most > 0:
        yield most
