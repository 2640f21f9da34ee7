"""One step's rows as device tensors. T tokens, B rows, R rows that sample, S slots."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

import torch

from dovetail.core.interfaces import (
    Adapters,
    AttentionBackend,
    AttnCtx,
    BatchMeta,
    HostBounds,
    KVGroup,
    Row,
    StepShape,
    TreeMask,
)
from dovetail.core.interfaces.plan import DECODE, SAMPLE
from dovetail.core.ops.step import TokenLayout, lay_out_pages, lay_out_tokens
from dovetail.core.ops.trees import count_bits, place_tree
from dovetail.core.worker.device_state import DeviceState


class Rows:
    """A plan's rows by column: one call per question for hundreds of rows. The plan must be in canonical order."""

    def __init__(self, rows: Seq[Row]) -> None:
        columns: Seq[tuple[int, ...]] = tuple(zip(*rows, strict=True)) or ((),) * len(Row._fields)
        self.slots, self.uids, self.epochs, self.counts, self.bounds, self.drafts, self.flags = columns
        self.decodes = bisect_left(self.flags, True, key=lambda flags: not flags & DECODE)
        """Number of decode rows; they come first."""
        self.sampled: Seq[int] = range(len(rows))
        """Indices of the rows that sample."""
        self.sampled_slots: Seq[int] = self.slots
        if not all(flags & SAMPLE for flags in set(self.flags)):
            self.sampled = [i for i, flags in enumerate(self.flags) if flags & SAMPLE]
            self.sampled_slots = [self.slots[i] for i in self.sampled]

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def starts(self) -> list[int]:
        """Index of each row's first token, then the number of tokens."""
        return [0, *accumulate(self.counts)]

    @property
    def width(self) -> int:
        """W: 1 + most drafts of any row."""
        return 1 + max(self.drafts, default=0)

    @property
    def shape(self) -> StepShape:
        """Bounds that decide which graph serves the rows."""
        decodes, moved = self.decodes, len(self) - len(self.sampled)
        pairs = sum(map(mul, self.counts[decodes:], self.bounds[decodes:]))
        return StepShape(sum(self.counts), decodes, max(len(self) - decodes, moved), self.width, pairs, 0)

    @property
    def max_len(self) -> int:
        """Upper bound of every length after the step, sampled tokens included."""
        return max(self.bounds) + 1


@dataclass(slots=True)
class Batch:
    """Everything that forward and sampling need. Numbers on the host are bounds; device tensors are exact."""

    rows: Rows
    tokens: TokenLayout
    attn: dict[int, AttnCtx]


def build_batch(
    rows: Rows,
    slots_B: torch.Tensor,
    row_start_B1: torch.Tensor,
    state: DeviceState,
    groups: Seq[KVGroup],
    attention: AttentionBackend,
    lookahead: int = 0,
) -> Batch:
    """slots_B and row_start_B1 (int64) describe `rows` on the device. `lookahead`: most drafts of any step's rows."""
    host = HostBounds(rows.counts, rows.bounds, rows.decodes, 1 + lookahead if rows.width > 1 else 0)
    return Batch(rows, *lay_out(slots_B, row_start_B1.int(), sum(rows.counts), host, state, groups, attention))


def lay_out(
    slots_B: torch.Tensor,
    row_start_B1: torch.Tensor,
    total: int,
    host: HostBounds,
    state: DeviceState,
    groups: Seq[KVGroup],
    attention: AttentionBackend,
    first_S: torch.Tensor | None = None,
    tree: TreeMask | None = None,
    given_S: torch.Tensor | None = None,
) -> tuple[TokenLayout, dict[int, AttnCtx]]:
    """Lay out `total` tokens, and attention metadata by KV group. Positions come from lengths on the device, so rows
    can be laid out before the previous step has ended. All work is on the device and can be captured. `first_S`:
    index of each slot's first token, in a pass of the drafter; by default the number of computed ones. `tree`: mask of
    such a pass over drafts of trees. `given_S`: as in lay_out_pages, by default the state's."""
    drafts_S = state.drafts_S if first_S is None else None
    first_S = state.computed_S if first_S is None else first_S
    tokens = lay_out_tokens(
        slots_B, row_start_B1, first_S, state.tokens_SL, total, max(host.counts), drafts_S, host.num_decode
    )
    if tree is not None:
        positions_T = tree.root_T + count_bits(tree.ancestors_T)
        tokens = replace(tokens, positions_T=positions_T, index_T=tokens.positions_T, tree=tree)
    elif drafts_S is not None and state.trees is not None and host.widest_decode > 1:
        tokens = place_tree(tokens, first_S, state.trees, host.num_decode)
    given_S = state.given_S if given_S is None else given_S
    planned = attention.plan_host(host)
    attn = {}
    for group in groups:
        pages = lay_out_pages(slots_B, tokens, state.tables[group.id], given_S, group.page_tokens)
        meta = BatchMeta(
            row_start_B1=row_start_B1,
            kv_len_B=tokens.kv_len_B,
            slots_B=slots_B,
            positions_T=tokens.positions_T,
            rows_T=tokens.rows_T,
            page_table_BP=pages.page_table_BP,
            write_T=pages.write_T,
            page_tokens=group.page_tokens,
            tree=tokens.tree,
        )
        attn[group.id] = attention.plan_device(meta, host, planned)
    return tokens, attn


@contextmanager
def adapting(adapters: Adapters | None, adapter_S: torch.Tensor, slots_T: torch.Tensor) -> Iterator[None]:
    """Wrap the layers of a step: each token uses the adapter of its slot. `adapters` None = no row has one."""
    if adapters is None:
        yield
        return
    adapters.slots_T = adapter_S[slots_T]
    try:
        yield
    finally:
        adapters.slots_T = None
