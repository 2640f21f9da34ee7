"""Visibility mask: a query sees keys up to its own, within its window, and only its ancestors in a draft tree."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def visible(key, at, token, tree_ptr, hi, WINDOW: tl.constexpr):
    """Whether each query sees each key before `hi`, in the broadcast shape of `key`, `at` (the index of each query's
    own key) and `token` (each query's row of tree_ptr: root, first key up to the root that it sees, bits of the drafts
    behind the root that it sees; the last two are made for this window)."""
    if tree_ptr is None:
        seen = key <= at
        if WINDOW:
            seen = seen & (key > at - WINDOW)
    else:
        tree = tree_ptr + token.to(tl.int64) * 3
        draft = key - tl.load(tree) - 1
        bit = (tl.load(tree + 2) >> tl.minimum(tl.maximum(draft, 0), 63)) & 1
        seen = tl.where(draft < 0, key >= tl.load(tree + 1), (bit != 0) & (draft < 64))
    return seen & (key < hi)
