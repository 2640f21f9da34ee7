"""Page tables and step metadata for suites that run attention or a model without the engine.

Shapes: T tokens of the step, B rows, P pages per table.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import BatchMeta, HostBounds, KVGroup
from dovetail.core.memory.pools import make_pools


@dataclass(slots=True)
class PagedStep:
    """Rows of one step as backends see them."""

    host: HostBounds
    metas: dict[int, BatchMeta]
    """Metadata by KV group id."""
    positions_T: torch.Tensor
    """int64; padding at the end has position 0."""
    starts: tuple[int, ...]
    """Length of each row's sequence before the step."""


class Paging:
    """Named sequences with page tables. Pages are shuffled, and poisoned where nothing was written.

    Table entries past a row's pages name arbitrary pages, as stale entries of a reused table do.
    """

    def __init__(
        self,
        groups: Iterable[KVGroup],
        device: torch.device,
        *,
        pages: int = 64,
        poison: float = float("nan"),
        rng: random.Random | None = None,
    ) -> None:
        self.groups, self.device, self.pages, self.rng = tuple(groups), device, pages, rng or random.Random(0)
        self.pools = make_pools(self.groups, {group.id: pages for group in self.groups}, device)
        for pool in self.pools.values():
            for plane in pool.planes.values():
                plane.fill_(poison)
        self.free = {group.id: self.rng.sample(range(1, pages + 1), pages) for group in self.groups}
        self.tables: dict[tuple[int, str], list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.slots: dict[str, int] = {}

    def step(
        self,
        rows: Sequence[tuple[str, int]],
        *,
        num_decode: int = 0,
        slack: int = 0,
        padding: int = 0,
        gap: int = 0,
        spare: int = 0,
        ragged: bool = False,
    ) -> PagedStep:
        """Grow each named sequence by a number of tokens. The first num_decode rows are decode rows.

        `slack` makes the host's bounds of decode rows loose. `padding` adds tokens that belong to no row and write to
        scratch page 0. `gap` shifts positions relative to cache indices. `spare` adds that many empty rows after the
        decode rows and after the others, and sets the host's numbers to a captured graph's capacity. `ragged`: the
        graph is for decode rows of unlike lengths, which no others follow.
        """
        counts = [count for _, count in rows]
        starts = [self.lengths.get(name, 0) for name, _ in rows]
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        for (name, _), length in zip(rows, lengths, strict=True):
            self.lengths[name] = length
            self.slots.setdefault(name, 2 * len(self.slots) + 1)
        bounds = [n + (slack if row < num_decode else 0) for row, n in enumerate(lengths)]
        places = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
        row_of = [row for row, count in enumerate(counts) for _ in range(count)]
        pad = [0] * padding
        positions = [place + gap for place in places]
        metas = {}
        for group in self.groups:
            size = group.page_tokens
            tables = [self.table(group, name, self.lengths[name]) for name, _ in rows]
            width = max(*(ceil_div(bound, size) for bound in bounds), *map(len, tables)) + 2
            write = [tables[row][at // size] * size + at % size for row, at in zip(row_of, places, strict=True)]
            padded = [table + [self.rng.randint(0, self.pages) for _ in range(width - len(table))] for table in tables]
            metas[group.id] = BatchMeta(
                row_start_B1=self._tensor([sum(counts[:i]) for i in range(len(rows) + 1)], torch.int32),
                kv_len_B=self._tensor(lengths, torch.int32),
                slots_B=self._tensor([self.slots[name] for name, _ in rows], torch.int64),
                positions_T=self._tensor(positions + pad, torch.int64),
                rows_T=self._tensor(row_of + pad, torch.int64),
                page_table_BP=self._tensor(padded, torch.int32),
                write_T=self._tensor(write + pad, torch.int64),
                page_tokens=size,
            )
        host = HostBounds(tuple(counts), tuple(bounds), num_decode)
        if spare:
            tokens, decodes = len(places) + padding, num_decode + spare
            others = 0 if ragged else len(rows) - num_decode + spare
            width = max(counts[:num_decode], default=1)
            bound = max(bounds) + slack
            host = HostBounds((width,) * decodes + (tokens,) * others, (bound,) * (decodes + others), decodes)
            metas = {
                id: self._with_spare(meta, num_decode, spare, 0 if ragged else spare) for id, meta in metas.items()
            }
        return PagedStep(host, metas, self._tensor(positions + pad, torch.int64), tuple(starts))

    def _with_spare(self, meta: BatchMeta, num_decode: int, spare: int, others: int) -> BatchMeta:
        """Insert `spare` empty rows after the decode rows, and `others` after the others."""
        rows = len(meta.kv_len_B)
        ends = meta.row_start_B1[num_decode], meta.row_start_B1[rows]

        def insert(values: torch.Tensor, *fill: torch.Tensor | int) -> torch.Tensor:
            first, second = (
                torch.full((more, *values.shape[1:]), int(n), dtype=values.dtype, device=self.device)
                for more, n in zip((spare, others), fill, strict=True)
            )
            return torch.cat((values[:num_decode], first, values[num_decode:], second))

        return replace(
            meta,
            row_start_B1=insert(meta.row_start_B1, *ends),
            kv_len_B=insert(meta.kv_len_B, 0, 0),
            slots_B=insert(meta.slots_B, 0, 0),
            rows_T=torch.where(meta.rows_T < num_decode, meta.rows_T, meta.rows_T + spare),
            page_table_BP=insert(meta.page_table_BP, 0, 0),
        )

    def table(self, group: KVGroup, name: str, length: int) -> list[int]:
        """Return the page ids of a sequence, grown to hold `length` tokens."""
        table = self.tables.setdefault((group.id, name), [])
        while len(table) * group.page_tokens < length:
            table.append(self.free[group.id].pop())
        return table

    def rewind(self, name: str, tokens: int) -> None:
        """Drop the last tokens of a sequence, as rejected drafts. Its pages stay allocated."""
        self.lengths[name] -= tokens

    def _tensor(self, data: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype, device=self.device)
