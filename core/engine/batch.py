"""One step's rows as device tensors. T tokens, B rows, R rows that sample, W sampled positions per row, S slots."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from dovetail.core.engine.device_state import DeviceState
from dovetail.core.interfaces import AttentionBackend, AttnCtx, BatchMeta, HostBounds, KVGroup, Row, RowFlag


@dataclass(slots=True)
class Batch:
    """Everything forward and sampling need. Host numbers are bounds; device tensors are exact."""

    rows: Seq[Row]
    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    attn: dict[int, AttnCtx]
    first_B: torch.Tensor
    """First token index of each row."""
    sampled: list[int]
    """Indices into rows."""
    width: int
    """W: 1 + most drafts of any sampled row."""
    max_len: int
    """Bound of every length in the step, the sampled tokens included."""


def build_batch(rows: Seq[Row], state: DeviceState, groups: Seq[KVGroup], attention: AttentionBackend) -> Batch:
    """Positions come from the device's own lengths, so that rows may be built before the previous step has ended."""
    device = state.device
    counts = tuple(row.count for row in rows)
    total = sum(counts)
    packed = state.upload([(row.slot, row.count) for row in rows], torch.int64)  # type: ignore[arg-type]
    slots_B, count_B = packed.unbind(1)
    ends_B = count_B.cumsum(0)
    rows_T = torch.repeat_interleave(torch.arange(len(rows), device=device), count_B, output_size=total)
    decodes = sum(1 for row in rows if row.flags & RowFlag.DECODE)
    host = HostBounds(counts, tuple(row.bound for row in rows), decodes)
    tokens = locate_tokens(slots_B, count_B, ends_B, rows_T, state)
    return make_batch(rows, tokens, contexts(tokens, host, state, groups, attention))


@dataclass(slots=True)
class Tokens:
    """Which tokens a step feeds, and from where."""

    slots_B: torch.Tensor
    count_B: torch.Tensor
    start_B: torch.Tensor
    """Exact KV length of each row before the step."""
    first_B: torch.Tensor
    row_start_B1: torch.Tensor
    rows_T: torch.Tensor
    slots_T: torch.Tensor
    positions_T: torch.Tensor
    ids_T: torch.Tensor


def locate_tokens(
    slots_B: torch.Tensor, count_B: torch.Tensor, ends_B: torch.Tensor, rows_T: torch.Tensor, state: DeviceState
) -> Tokens:
    """All on the device: capturable."""
    first_B = ends_B - count_B
    start_B = state.computed_S[slots_B]
    slots_T = slots_B[rows_T]
    positions_T = start_B[rows_T] + torch.arange(len(rows_T), device=state.device) - first_B[rows_T]
    row_start_B1 = torch.nn.functional.pad(ends_B, (1, 0)).int()
    ids_T = state.tokens_SL[slots_T, positions_T]
    return Tokens(slots_B, count_B, start_B, first_B, row_start_B1, rows_T, slots_T, positions_T, ids_T)


def contexts(
    tokens: Tokens, host: HostBounds, state: DeviceState, groups: Seq[KVGroup], attention: AttentionBackend
) -> dict[int, AttnCtx]:
    """Attention metadata by KV group."""
    planned = attention.plan_host(host)
    found = {}
    for group in groups:
        table = state.tables[group.id]
        page_T = table[tokens.slots_T, tokens.positions_T // group.page_tokens].long()
        meta = BatchMeta(
            row_start_B1=tokens.row_start_B1,
            kv_len_B=(tokens.start_B + tokens.count_B).int(),
            slots_B=tokens.slots_B,
            positions_T=tokens.positions_T,
            rows_T=tokens.rows_T,
            page_table_BP=table[tokens.slots_B],
            write_T=page_T * group.page_tokens + tokens.positions_T % group.page_tokens,
            page_tokens=group.page_tokens,
        )
        found[group.id] = attention.plan_device(meta, host, planned)
    return found


def make_batch(rows: Seq[Row], tokens: Tokens, attn: dict[int, AttnCtx]) -> Batch:
    sampled = [i for i, row in enumerate(rows) if row.flags & RowFlag.SAMPLE]
    return Batch(
        rows=rows,
        tokens_T=tokens.ids_T,
        positions_T=tokens.positions_T,
        slots_T=tokens.slots_T,
        attn=attn,
        first_B=tokens.first_B,
        sampled=sampled,
        width=1 + max((rows[i].draft for i in sampled), default=0),
        max_len=max(row.bound for row in rows) + 1,
    )
