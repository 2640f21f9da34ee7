"""Visibility mask: a query sees keys up to its own, within its window, and only its ancestors in a draft tree."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def visible(key, at, token, tree_ptr, tree_width, hi, length, WINDOW: tl.constexpr):
    """Whether each query sees each key before `hi`, in the broadcast shape of `key`, `at` (the index of each query's
    own key) and `token` (each query's row of the tree mask)."""
    if tree_ptr is None:
        seen = key <= at
    else:
        back = key - (length - tree_width)
        in_tree = (back >= 0) & (back < tree_width)
        seen = tl.load(tree_ptr + token * tree_width + back, mask=in_tree, other=1).to(tl.int1)
    if WINDOW:
        seen = seen & (key > at - WINDOW)
    return seen & (key < hi)
