"""One step's rows as device tensors. T tokens, B rows, R rows that sample, S slots."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import torch

from dovetail.core.engine.device_state import DeviceState
from dovetail.core.interfaces import AttentionBackend, AttnCtx, BatchMeta, HostBounds, KVGroup, Row, RowFlag
from dovetail.core.ops.step import TokenLayout, lay_out_pages, lay_out_tokens

DECODE, SAMPLE = int(RowFlag.DECODE), int(RowFlag.SAMPLE)
"""Plain integers: an IntFlag takes microseconds, and there are hundreds of rows."""


@dataclass(slots=True)
class Batch:
    """Everything forward and sampling need. Host numbers are bounds; device tensors are exact."""

    rows: Seq[Row]
    tokens: TokenLayout
    attn: dict[int, AttnCtx]
    sampled: list[int]
    """Indices into rows."""
    width: int
    """W: 1 + most drafts of any sampled row."""
    max_len: int
    """Bound of every length in the step, the sampled tokens included."""


def sampled_rows(rows: Seq[Row]) -> list[int]:
    return [i for i, row in enumerate(rows) if row.flags & SAMPLE]


def row_starts(rows: Seq[Row]) -> list[int]:
    """Index of each row's first token, then their number."""
    return [0, *accumulate(row.count for row in rows)]


def build_batch(
    rows: Seq[Row],
    slots_B: torch.Tensor,
    row_start_B1: torch.Tensor,
    state: DeviceState,
    groups: Seq[KVGroup],
    attention: AttentionBackend,
) -> Batch:
    """slots_B and row_start_B1 (int64) are the rows' own, on the device."""
    counts = tuple(row.count for row in rows)
    decodes = sum(1 for row in rows if row.flags & DECODE)
    host = HostBounds(counts, tuple(row.bound for row in rows), decodes)
    tokens, attn = lay_out(slots_B, row_start_B1.int(), sum(counts), host, state, groups, attention)
    return make_batch(rows, tokens, attn)


def lay_out(
    slots_B: torch.Tensor,
    row_start_B1: torch.Tensor,
    total: int,
    host: HostBounds,
    state: DeviceState,
    groups: Seq[KVGroup],
    attention: AttentionBackend,
) -> tuple[TokenLayout, dict[int, AttnCtx]]:
    """`total` tokens, and attention metadata by KV group. Positions come from the device's own lengths, so that rows
    may be built before the previous step has ended. All on the device: capturable."""
    tokens = lay_out_tokens(slots_B, row_start_B1, state.computed_S, state.tokens_SL, total, max(host.counts))
    planned = attention.plan_host(host)
    attn = {}
    for group in groups:
        pages = lay_out_pages(slots_B, tokens, state.tables[group.id], group.page_tokens)
        meta = BatchMeta(
            row_start_B1=row_start_B1,
            kv_len_B=tokens.kv_len_B,
            slots_B=slots_B,
            positions_T=tokens.positions_T,
            rows_T=tokens.rows_T,
            page_table_BP=pages.page_table_BP,
            write_T=pages.write_T,
            page_tokens=group.page_tokens,
        )
        attn[group.id] = attention.plan_device(meta, host, planned)
    return tokens, attn


def make_batch(rows: Seq[Row], tokens: TokenLayout, attn: dict[int, AttnCtx]) -> Batch:
    sampled = sampled_rows(rows)
    return Batch(
        rows=rows,
        tokens=tokens,
        attn=attn,
        sampled=sampled,
        width=1 + max((rows[i].draft for i in sampled), default=0),
        max_len=max(row.bound for row in rows) + 1,
    )
