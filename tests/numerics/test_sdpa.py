"""The reference backend against attention written as loops.

Shapes: T tokens, W tokens of a tree, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import pytest
import torch

from dovetail.core.interfaces import PLAIN, AttentionLayer, BatchMeta, HostBounds, KVGroup, Plane
from dovetail.core.memory.pools import make_pools
from dovetail.plugins.attention.config import SDPAConfig
from dovetail.plugins.attention.sdpa.backend import SDPA
from dovetail.plugins.quant.int8.format import INT8_TOKEN

H, K, D, PAGE_TOKENS, PAGES = 6, 2, 16, 4, 40


def make_step(lengths, counts, num_decode, window=0, tree_width=0, slack=0, dtype=torch.float32):
    """Make random q, k, v in pages that are NaN elsewhere. Return backend, layer, ctx, q and the pages."""
    torch.seed()
    plane = (K, D)
    group = KVGroup(0, (0, 1), (Plane("k", plane, dtype), Plane("v", plane, dtype)), page_tokens=PAGE_TOKENS)
    pools = make_pools([group], {0: PAGES}, torch.device("cpu"))
    for tensor in pools[0].planes.values():
        tensor.fill_(float("nan"))
    free = (torch.randperm(PAGES) + 1).tolist()
    tables = [[free.pop() for _ in range(-(-length // PAGE_TOKENS))] for length in lengths]
    for table, length in zip(tables, lengths, strict=True):
        for index in range(length):
            for tensor in pools[0].planes.values():
                tensor[1, table[index // PAGE_TOKENS], index % PAGE_TOKENS] = torch.randn(K, D).to(dtype)
    total, width = sum(counts), max(map(len, tables)) + 3
    row_of = [row for row, count in enumerate(counts) for _ in range(count)]
    starts = [length - count for length, count in zip(lengths, counts, strict=True)]
    meta = BatchMeta(
        row_start_B1=torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32),
        kv_len_B=torch.tensor(lengths, dtype=torch.int32),
        slots_B=torch.arange(len(counts)),
        positions_T=torch.tensor([s + i for s, c in zip(starts, counts, strict=True) for i in range(c)]),
        rows_T=torch.tensor(row_of),
        page_table_BP=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
        write_T=torch.zeros(total, dtype=torch.int64),
        page_tokens=PAGE_TOKENS,
        tree_mask_TW=torch.rand(total, tree_width) < 0.5 if tree_width else None,
    )
    bounds = tuple(n + slack if row < num_decode else n for row, n in enumerate(lengths))
    backend = SDPA(SDPAConfig())
    backend.bind(pools)
    ctx = backend.plan_device(meta, HostBounds(tuple(counts), bounds, num_decode), None)
    layer = AttentionLayer(1, 0, 1, H, K, D, 0.3, window)
    return backend, layer, ctx, torch.randn(total, H, D).to(dtype), pools[0], tables


def attend_by_loops(layer, ctx, q_THD, pool, tables):
    meta, tokens = ctx.meta, []
    for t in range(q_THD.shape[0]):
        row = int(meta.rows_T[t])
        length = int(meta.kv_len_B[row])
        at = length - int(meta.row_start_B1[row + 1]) + t
        seen = []
        for key in range(length):
            visible = key <= at
            if meta.tree_mask_TW is not None:
                back = key - (length - meta.tree_mask_TW.shape[1])
                visible = back < 0 or bool(meta.tree_mask_TW[t, back])
            if visible and (not layer.window or key > at - layer.window):
                seen.append((tables[row][key // PAGE_TOKENS], key % PAGE_TOKENS))
        heads = []
        for h in range(H):
            keys, values = (
                torch.stack([pool.layer(1, name)[page, slot, h // (H // K)].double() for page, slot in seen])
                for name in "kv"
            )
            weights = torch.softmax(keys @ q_THD[t, h].double() * layer.scale, dim=0)
            heads.append(weights @ values)
        tokens.append(torch.cat(heads))
    return torch.stack(tokens)


@pytest.mark.parametrize(
    "options",
    [
        {"lengths": (9, 5, 17), "counts": (9, 5, 17), "num_decode": 0},
        {"lengths": (9, 5, 17), "counts": (1, 1, 1), "num_decode": 3, "slack": 5},
        {"lengths": (9, 6, 17, 12, 20), "counts": (3, 1, 4, 5, 20), "num_decode": 3, "slack": 7},
        {"lengths": (9, 6, 17, 12, 20), "counts": (3, 1, 4, 5, 20), "num_decode": 3, "window": 6},
        {"lengths": (9, 17), "counts": (4, 4), "num_decode": 2, "tree_width": 4, "slack": 3},
    ],
    ids=["prompts", "decode", "mixed", "window", "tree"],
)
def test_equals_loops(options):
    backend, layer, ctx, q_THD, pool, tables = make_step(**options)
    if ctx.meta.tree_mask_TW is not None:
        ctx.meta.tree_mask_TW.fill_(True).tril_()  # every token keeps itself; below, some ancestors are masked
        ctx.meta.tree_mask_TW[1, 0] = ctx.meta.tree_mask_TW[6, 1] = False
        ctx = backend.plan_device(ctx.meta, ctx.host, None)
    got = backend.attend(layer, ctx, q_THD)[PLAIN].values
    torch.testing.assert_close(got.double(), attend_by_loops(layer, ctx, q_THD, pool, tables), atol=2e-6, rtol=0)


def test_bfloat16():
    options = {"lengths": (9, 6, 20), "counts": (1, 1, 20), "num_decode": 2, "dtype": torch.bfloat16}
    backend, layer, ctx, q_THD, pool, tables = make_step(**options)
    got = backend.attend(layer, ctx, q_THD)[PLAIN].values
    assert got.dtype == torch.bfloat16
    expected = attend_by_loops(layer, ctx, q_THD, pool, tables)
    assert (got.double() - expected).norm() / expected.norm() < 0.01


def test_emits_what_its_consumer_wants():
    backend, layer, ctx, q_THD, *_ = make_step((9,), (9,), 0)
    bundle = backend.attend(layer, ctx, q_THD, emit=(INT8_TOKEN, PLAIN))
    plain, int8 = bundle[PLAIN].values, bundle[INT8_TOKEN]
    assert ((int8.values * int8.scale - plain).abs() <= int8.scale / 2 + 1e-6).all()
