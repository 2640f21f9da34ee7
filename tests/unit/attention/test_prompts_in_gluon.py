"""Hopper's kernel for prompts in the interpreter of Gluon, against float64: heads, windows, caps, sinks and ranges."""

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
from dovetail.plugins.attention.triton.hopper.launch import attend
from dovetail.plugins.attention.triton.tiles import PromptTile

PAGE = 64


@dataclass(frozen=True)
class Case:
    heads: tuple[int, int, int]
    """Query heads, kv heads, head dim."""
    counts: tuple[int, ...]
    """Tokens of each row."""
    lengths: tuple[int, ...]
    """Keys of each row."""
    splits: int = 1
    persistent: bool = True
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.bfloat16
    programs: int = 2


CASES = [
    Case((4, 2, 128), (70, 130), (70, 200)),
    Case((4, 4, 64), (40, 5), (300, 5), splits=2),
    Case((7, 1, 128), (33,), (97,), persistent=False),
    Case((4, 2, 128), (60,), (260,), window=50),
    Case((2, 2, 256), (40,), (100,)),
    Case((2, 1, 80), (40,), (129,), soft_cap=20.0),
    Case((4, 1, 96), (20, 90), (64, 90), sinks=True, dtype=torch.float16),
]


def items_of(case: Case, tile: PromptTile, queries: int) -> torch.Tensor:
    """Items as plan_items makes them: tiles in any order, each with as many ranges of keys."""
    items: list[list[int]] = []
    start = 0
    for row, (length, count) in enumerate(zip(case.lengths, case.counts, strict=True)):
        for query in range(0, count, queries):
            at, some, first = length - count + query, min(queries, count - query), len(items)
            seen = max(at - case.window + 1, 0) if case.window else 0
            base = seen // tile.block_n * tile.block_n
            each = -(-(length - base) // (case.splits * tile.block_n)) * tile.block_n
            for split in range(case.splits):
                lo, end = base + split * each, min(at + some, length)
                hi = min(end, lo + each) if case.splits > 1 else end
                part = len(items) * queries if case.splits > 1 else -1
                items.append([row, start + query, some, at, seen, lo, hi, part, length, case.splits, first])
        start += count
    return torch.tensor(items, dtype=torch.int32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_equals_float64(case):
    """Pages in any order; slots that were not written, and page 0, hold NaN."""
    heads, kv_heads, dim = case.heads
    group, tokens, rows = heads // kv_heads, sum(case.counts), len(case.counts)
    tile = PromptTile(128, 128 if dim <= 128 else 64, 4, 2, 1, least=1024, tma=True, persistent=case.persistent)
    queries, longest = tile.queries(group), -(-max(case.lengths) // PAGE)
    table = (torch.randperm(rows * longest) + 1).int().view(rows, longest)
    slots = [
        (table[row].long()[:, None] * PAGE + torch.arange(PAGE)).flatten()[:n] for row, n in enumerate(case.lengths)
    ]
    k, v = (torch.full(((rows * longest + 1) * PAGE, kv_heads, dim), torch.nan, dtype=case.dtype) for _ in range(2))
    for mine in slots:
        k[mine], v[mine] = (torch.randn(len(mine), kv_heads, dim).to(case.dtype) for _ in range(2))
    q = torch.randn(tokens, heads, dim).to(case.dtype)
    sinks = torch.randn(heads) if case.sinks else None
    layer = AttentionLayer(
        0, 0, 0, heads, kv_heads, dim, dim**-0.5, window=case.window, soft_cap=case.soft_cap, sinks=sinks
    )
    items = items_of(case, tile, queries)
    finished = torch.zeros(2 * len(items) * kv_heads * tile.head_tiles(group), dtype=torch.int32)
    out = torch.full((tokens, heads * dim), torch.nan, dtype=case.dtype)
    parts = torch.full((len(items) * queries, heads * dim), torch.nan)
    lse = torch.full((len(items) * queries, heads), torch.nan)
    with interpreted_gluon():
        attend(layer, q, k, v, PAGE, table, tile, items, finished, out, parts, lse, case.programs)
    assert not finished.any(), "counters are zero for the next launch"
    token = 0
    for mine, count in zip(slots, case.counts, strict=True):
        for at in range(len(mine) - count, len(mine)):
            seen = mine[max(at - case.window + 1, 0) if case.window else 0 : at + 1]
            keys, values = (x[seen].double().repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("khd,hd->hk", keys, q[token].double()) * layer.scale
            if case.soft_cap:
                scores = torch.tanh(scores / case.soft_cap) * case.soft_cap
            extra = torch.full((heads, 1), -torch.inf).double() if sinks is None else sinks.double()[:, None]
            weights = torch.cat((scores, extra), 1).softmax(1)[:, :-1]
            want = torch.einsum("hk,khd->hd", weights, values)
            got = out[token].double().view(heads, dim)
            assert ((got - want).norm(dim=1) / want.norm(dim=1)).max() < 6e-3
            token += 1
