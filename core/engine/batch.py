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
    counts = [row.count for row in rows]
    total = sum(counts)
    packed = state.upload([(row.slot, row.count) for row in rows], torch.int64)  # type: ignore[arg-type]
    slots_B, count_B = packed.unbind(1)
    ends_B = count_B.cumsum(0)
    first_B = ends_B - count_B
    rows_T = torch.repeat_interleave(torch.arange(len(rows), device=device), count_B, output_size=total)
    start_B = state.computed_S[slots_B]
    positions_T = start_B[rows_T] + torch.arange(total, device=device) - first_B[rows_T]
    slots_T = slots_B[rows_T]
    row_start = torch.zeros(len(rows) + 1, dtype=torch.int32, device=device)
    row_start[1:] = ends_B
    host = HostBounds(
        tuple(counts), tuple(row.bound for row in rows), sum(1 for row in rows if row.flags & RowFlag.DECODE)
    )
    planned = attention.plan_host(host)
    attn = {}
    for group in groups:
        table = state.tables[group.id]
        page_T = table[slots_T, positions_T // group.page_tokens].long()
        meta = BatchMeta(
            row_start_B1=row_start,
            kv_len_B=(start_B + count_B).int(),
            slots_B=slots_B,
            positions_T=positions_T,
            rows_T=rows_T,
            page_table_BP=table[slots_B],
            write_T=page_T * group.page_tokens + positions_T % group.page_tokens,
            page_tokens=group.page_tokens,
        )
        attn[group.id] = attention.plan_device(meta, host, planned)
    sampled = [i for i, row in enumerate(rows) if row.flags & RowFlag.SAMPLE]
    return Batch(
        rows=rows,
        tokens_T=state.tokens_SL[slots_T, positions_T],
        positions_T=positions_T,
        slots_T=slots_T,
        attn=attn,
        first_B=first_B,
        sampled=sampled,
        width=1 + max((rows[i].draft for i in sampled), default=0),
        max_len=max(row.bound for row in rows) + 1,
    )
