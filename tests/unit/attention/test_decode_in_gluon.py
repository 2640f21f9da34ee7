"""Hopper's kernel for rows that decode in the interpreter of Gluon: heads, windows, pages and ranges."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton, whose interpreter replaces functions of these kernels", allow_module_level=True)

import torch

from dovetail.core.interfaces import AttentionLayer
from dovetail.core.testing.gluon_interpreter import interpreted_gluon
from dovetail.plugins.attention.triton.hopper.launch import decode
from dovetail.plugins.attention.triton.tiles import EMPTY, WARP_KEYS, DecodeTile

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    heads: tuple[int, int, int]
    """Query heads, kv heads, head dim."""
    lengths: tuple[int, ...]
    splits: int = 1
    tokens: int = 1
    """Tokens of each row, which one tile has."""
    kv_dtype: torch.dtype = BF16
    window: int = 0
    page: int = 32
    sinks: bool = False
    writes: bool = False


CASES = [
    Case((4, 2, 64), (70, 130)),
    Case((8, 1, 128), (300,), splits=2, page=16),
    Case((8, 2, 128), (40, 300, 1), splits=3, kv_dtype=E4M3),
    Case((16, 1, 64), (90,), window=50),
    Case((32, 2, 128), (700,), splits=9, sinks=True),
    Case((4, 1, 80), (33, 200), writes=True),
    Case((4, 2, 128), (9, 129), writes=True, kv_dtype=E4M3, splits=2),
    Case((8, 4, 128), (20, 150), tokens=4),
]


def plan(case: Case, tile: DecodeTile, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Items as plan_items makes them, and the pages of the first keys of each."""
    items: list[list[int]] = []
    first_pages = []
    grain = tile.grain(case.page)
    for row, length in enumerate(case.lengths):
        at, first = length - case.tokens, len(items)
        seen = max(at - case.window + 1, 0) if case.window else 0
        base = seen // tile.span * tile.span
        each = -(-(length - base) // (case.splits * tile.span)) * tile.span
        for split in range(case.splits):
            lo = base + split * each
            hi = min(length, lo + each) if case.splits > 1 else length
            part = len(items) if case.splits > 1 else -1
            items.append([row, row * case.tokens, case.tokens, at, seen, lo, hi, part, length, case.splits, first])
            for key in range(lo, lo + tile.prefetch_keys, grain):
                first_pages.append(int(table[row, key // case.page]) if key < length else 0)
    return torch.tensor(items, dtype=torch.int32), torch.tensor(first_pages, dtype=torch.int32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_equals_float64(case):
    """Pages in any order; those of no row hold NaN. Ranges of a row are joined through mailboxes, which are empty
    again."""
    heads, kv_heads, dim = case.heads
    group, rows, longest = heads // kv_heads, len(case.lengths), -(-max(case.lengths) // case.page)
    tile = DecodeTile(8 if group <= 8 else 16, WARP_KEYS, 4, 2, 2, least=128, tokens=case.tokens)
    table = (torch.randperm(rows * longest) + 1).int().view(rows, longest)
    k, v = (torch.randn(rows * longest + 1, case.page, kv_heads, dim).to(case.kv_dtype) for _ in range(2))
    q = torch.randn(rows * case.tokens, heads * dim).to(BF16)
    new_k, new_v = (torch.randn(rows, kv_heads, dim).to(BF16) for _ in range(2))
    slots = [(table[row].long()[:, None] * case.page + torch.arange(case.page)).flatten() for row in range(rows)]
    expected = []
    for x, new in ((k, new_k), (v, new_v)):
        x[0] = torch.nan
        expected.append(x.double().flatten(0, 1))
        for row, length in enumerate(case.lengths):
            if case.writes:
                x.flatten(0, 1)[slots[row][length - 1]] = torch.nan
                expected[-1][slots[row][length - 1]] = new[row].to(case.kv_dtype).double()
    items, first_pages = plan(case, tile, table)
    units = kv_heads * tile.head_tiles(group)
    mail = torch.full((len(items) * units * tile.box_words(dim),), EMPTY, dtype=torch.int32)
    sinks = torch.randn(heads) if case.sinks else None
    layer = AttentionLayer(0, 0, 0, heads, kv_heads, dim, dim**-0.5, window=case.window, sinks=sinks)
    out = torch.full_like(q, torch.nan)
    given = torch.cat((q, new_k.flatten(1), new_v.flatten(1)), 1) if case.writes else q
    with interpreted_gluon():
        decode(layer, given, k, v, table, tile, items, first_pages, mail, out, case.writes, None, None)
    assert (mail == EMPTY).all()
    for token in range(len(q)):
        row = token // case.tokens
        end = case.lengths[row] - case.tokens + token % case.tokens + 1
        seen = slots[row][max(end - case.window, 0) if case.window else 0 : end]
        keys, values = (x[seen].repeat_interleave(group, 1) for x in expected)
        scores = torch.einsum("khd,hd->hk", keys, q[token].double().view(heads, dim)) * layer.scale
        extra = torch.full((heads, 1), -torch.inf).double() if sinks is None else sinks.double()[:, None]
        want = torch.einsum("hk,khd->hd", torch.cat((scores, extra), 1).softmax(1)[:, :-1], values)
        got = out[token].double().view(heads, dim)
        assert ((got - want).norm(dim=1) / want.norm(dim=1)).max() < 8e-3
    if case.writes:
        for x, want_x in ((k, expected[0]), (v, expected[1])):
            for row, length in enumerate(case.lengths):
                assert torch.equal(x.flatten(0, 1)[slots[row][length - 1]].double(), want_x[slots[row][length - 1]])
