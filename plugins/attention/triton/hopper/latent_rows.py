"""Parts of both kernels for latents: rows of a tile, and queries for latents of 8 bits, which become float16
(latent_fetch.py).

Shapes: M rows of a tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

QUERY_FACTOR, MOST = gl.constexpr(2.0**-4), gl.constexpr(65504.0)
"""Factor of queries in float16, and its greatest number."""
ALL = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def rows_of_tile(count, unit, H: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, M: gl.constexpr):
    """Return query and head of each row of a tile of ROWS rows, and whether they exist. M: layout."""
    row = gl.arange(0, ROWS, M)
    query = row // HEADS
    head = unit * HEADS + row % HEADS
    return query, head, (query < count) & (query < ROWS // HEADS) & (head < H)


@gluon.jit
def narrowed(x):
    """Return queries in float16, times QUERY_FACTOR. NaN stays NaN, so that a broken state shows in the result."""
    x = x.to(gl.float32) * QUERY_FACTOR
    return gl.minimum(gl.maximum(x, -MOST, propagate_nan=ALL), MOST, propagate_nan=ALL).to(gl.float16)


@gluon.jit
def hidden_zero(n):
    """Return 0. The compiler cannot compute it before a loop, with all the descriptors of shared memory that depend on
    it, for which there are no registers."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1)
