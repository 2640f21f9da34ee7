"""Sections of int64 in which the host describes a step's rows to the device: how each is packed there and read here.

| section | shape | columns |
|---|---|---|
| sample rows | [R, 3] | index of the first token sampled, slot, drafts to verify at most |
| chunk rows | [X, 2] | slot, tokens |
| row slots | [B] | slot |
| row starts | [B + 1] | index of the row's first token; then the number of tokens |
| draft rows | [2, D] | slots of decode rows; drafts to verify at most |
| joins | [2, J] | slots; tokens whose KV is in the drafter's pages |
| catch-ups | [3, C] | slots; index of the first token; tokens at most |
| host drafts | [H, 2 + K] | slot, number of drafts, drafts |

A step without a graph sends the first four (`StepSections`). A graph reads them from one tensor (`GraphSections`), in
which padding rows name the scratch slot. Draft rows are sent unless the graph of a decode step drafts too.

B rows, R rows that sample, X rows that do not, D decode rows, J joins, C rows that catch up, H rows with drafts from
the host, K most drafts of a row, W = 1 + K, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dovetail.core.interfaces.plan import SAMPLE, CatchUp, HostDraft, Join

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.core.worker.batch import Rows
    from dovetail.core.worker.upload import Section

_SAMPLE, _CHUNK = 3, 2
"""Columns."""

# Sample rows. On the device ops.samples.gather_samples reads them for captured draws, unpack_samples for all others.


def pack_samples(rows: Rows, starts: Seq[int]) -> NDArray[np.int64]:
    """Return the sample rows [R, 3]. A decode row samples after each of its tokens, a chunk after its last one.
    `starts`: index of each row's first token."""
    first = [*starts[: rows.decodes], *(starts[i] + rows.counts[i] - 1 for i in range(rows.decodes, len(rows)))]
    samples_R3 = np.empty((len(rows), _SAMPLE), np.int64)
    samples_R3[:, 0], samples_R3[:, 1], samples_R3[:, 2] = first, rows.slots, rows.drafts
    return samples_R3 if len(rows.sampled) == len(rows) else samples_R3[rows.sampled]


def sample_padding(count: int, scratch: int) -> NDArray[np.int64]:
    """Return padding rows [count, 3]."""
    return np.array([(0, scratch, 0)] * count)


def view_samples(samples_N: torch.Tensor) -> torch.Tensor:
    """Return the section as [R, 3]."""
    return samples_N.view(-1, _SAMPLE)


@dataclass(slots=True)
class SamplePositions:
    """Positions that a step samples."""

    token_RW: torch.Tensor
    """Index into the step's tokens. Positions past a row's drafts repeat its last one."""
    slots_R: torch.Tensor
    base_R: torch.Tensor
    """Number of tokens that precede the first sampled one: the position that this one takes."""
    limit_R: torch.Tensor
    """Drafts to verify at most, 0 .. W-1; the row may have fewer."""
    position_RW: torch.Tensor
    """Number of tokens before the one to be drawn. Drafts of a tree that are siblings have one position."""


def unpack_samples(samples_N: torch.Tensor, rows: Rows, positions_T: torch.Tensor) -> SamplePositions:
    """Read the sample rows of `rows`; padding rows that follow them are left out."""
    samples_N = samples_N[: _SAMPLE * len(rows.sampled)]
    first_R, slots_R, limit_R = view_samples(samples_N).t().contiguous().unbind(0)
    step_W = torch.arange(rows.width, device=samples_N.device)
    token_RW = first_R[:, None] + torch.minimum(step_W[None, :], limit_R[:, None])
    return SamplePositions(token_RW, slots_R, positions_T[first_R] + 1, limit_R, positions_T[token_RW] + 1)


# Chunk rows.


def pack_chunks(rows: Rows) -> list[int]:
    """Return the rows that do not sample, flat. Only their computed length changes."""
    if len(rows.sampled) == len(rows):
        return []
    each = zip(rows.slots, rows.counts, rows.flags, strict=True)
    return [n for slot, count, flags in each if not flags & SAMPLE for n in (slot, count)]


def advance_chunks(chunks_N: torch.Tensor, computed_S: torch.Tensor) -> None:
    """Add each row's tokens to its computed length."""
    if len(chunks_N):
        slots, counts = chunks_N.view(-1, _CHUNK).unbind(1)
        computed_S[slots] += counts


# Draft rows.


def pack_draft_rows(rows: Rows, size: int, scratch: int) -> list[int]:
    """Return the decode rows, padded to `size` rows, flat."""
    padding = size - rows.decodes
    return [*rows.slots[: rows.decodes], *[scratch] * padding, *rows.drafts[: rows.decodes], *[0] * padding]


def draft_padding(size: int, scratch: int, device: torch.device) -> torch.Tensor:
    """Return draft rows that are all padding, int64 [2 * size], as `pack_draft_rows` packs them."""
    padding_2D = torch.zeros(2, size, dtype=torch.int64, device=device)
    padding_2D[0] = scratch
    return padding_2D.flatten()


def pack_joins(joins: Seq[Join]) -> list[int]:
    """Return the joins as the drafter needs them, flat."""
    return [*(join.slot for join in joins), *(join.computed - join.lacking for join in joins)]


def pack_catch_up(chunks: Seq[CatchUp]) -> list[int]:
    """Return the rows that the drafter catches up with, flat."""
    slots, firsts, counts = zip(*chunks, strict=True)
    return [*slots, *firsts, *counts]


def pack_host_drafts(drafts: Seq[HostDraft], most: int) -> list[int]:
    """Return the drafts, up to `most` of each row, flat."""
    packed: list[int] = []
    for slot, tokens in drafts:
        count = min(len(tokens), most)
        packed += (slot, count, *tokens[:count], *[0] * (most - count))
    return packed


# All of a step.


class StepSections(NamedTuple):
    """On the device, the input of a step without a graph."""

    samples_N: torch.Tensor
    """Padding rows may follow."""
    slots_B: torch.Tensor
    row_start_B1: torch.Tensor
    chunks_N: torch.Tensor

    @staticmethod
    def pack(rows: Rows, starts: Seq[int], samples_N: NDArray[np.int64]) -> list[Section]:
        """Return the sections in the order of the fields."""
        return [samples_N, rows.slots, starts, pack_chunks(rows)]


class GraphRows(NamedTuple):
    """On the device, the input of a graph."""

    slots_B: torch.Tensor
    row_start_B1: torch.Tensor
    """int32"""
    chunks_N: torch.Tensor | None
    samples_R3: torch.Tensor


@dataclass(frozen=True, slots=True)
class GraphSections:
    """Input of one graph as a single section. The graph of a mixed step, or of a decode step with ragged rows, reads
    row slots, row starts, chunk rows and sample rows; that of a decode step whose rows have W tokens each reads sample
    rows only."""

    decodes: int
    chunks: int
    """0 = decode steps."""
    samples: int
    ragged: bool = False
    """Rows of decode steps have up to W tokens each."""

    @property
    def before_samples(self) -> int:
        """Index of the sample rows."""
        return 2 * (self.decodes + self.chunks) + 1 + _CHUNK * self.chunks if self._lists_rows else 0

    @property
    def _lists_rows(self) -> bool:
        """Whether rows and their starts are in the section."""
        return self.chunks > 0 or self.ragged

    def pack(self, rows: Rows, starts: Seq[int], samples_N: NDArray[np.int64], scratch: int) -> Section:
        """`samples_N`: the sample rows, flat, with padding."""
        if not self._lists_rows:
            return samples_N
        slots, decodes, moved = rows.slots, rows.decodes, pack_chunks(rows)
        padding, idle = self.decodes - decodes, self.chunks - (len(rows) - decodes)
        return [
            *(*slots[:decodes], *[scratch] * padding, *slots[decodes:], *[scratch] * idle),
            *(*starts[:decodes], *[starts[decodes]] * padding, *starts[decodes:], *[starts[-1]] * idle),
            *(*moved, *[scratch, 0] * (self.chunks - len(moved) // _CHUNK)),
            *samples_N,
        ]

    def padding(self, scratch: int, device: torch.device) -> torch.Tensor:
        """Return the input of a step that has padding rows only."""
        rows = self.decodes + self.chunks
        before = [scratch] * rows + [0] * (rows + 1) + [scratch, 0] * self.chunks
        return torch.tensor(before[: self.before_samples] + [0, scratch, 0] * self.samples, device=device)

    def unpack(self, input_N: torch.Tensor, width: int) -> GraphRows:
        """`width`: W of a decode step."""
        rows, before = self.decodes + self.chunks, self.before_samples
        samples_R3 = view_samples(input_N[before:])
        if self._lists_rows:
            slots_B, row_start_B1, chunks_N = input_N[:before].split((rows, rows + 1, _CHUNK * self.chunks))
            return GraphRows(slots_B, row_start_B1.int(), chunks_N, samples_R3)
        slots_B = samples_R3[:, 1].contiguous()
        row_start_B1 = torch.arange(rows + 1, dtype=torch.int32, device=input_N.device) * width
        return GraphRows(slots_B, row_start_B1, None, samples_R3)
