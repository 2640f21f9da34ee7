"""StepPlan: everything the ranks need in order to run one step. It holds no token values.

A plan is a diff. Joins, leaves and page deltas change the persistent device state; rows name the work of this step.
With speculation and plans in flight only the device knows exact lengths, so lengths in rows are upper bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray


class RowFlag(IntFlag):
    """Bits of Row.flags. A row without SAMPLE yields no token: an unfinished prefill, or an embedding."""

    SAMPLE = 1
    """Sample after this row's last token."""
    DECODE = 2
    """A decode row: it feeds the last sampled token and its drafts. The device knows its position and draft count."""
    LATE = 4
    """The row samples only when its late inputs have arrived (LateInputs). The engine sets this on rows that sample."""


SAMPLE, DECODE, LATE = int(RowFlag.SAMPLE), int(RowFlag.DECODE), int(RowFlag.LATE)
DECODE_AND_SAMPLE = DECODE | SAMPLE
"""The flags as plain integers, for code that runs once per row: `&` on an IntFlag takes half a microsecond."""


class Row(NamedTuple):
    """The work of one sequence in a step."""

    slot: int
    uid: int
    epoch: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which rows do not need
    """Tokens fed: exact for a prefill chunk, at most 1 + draft for a decode row."""
    bound: int
    """Upper bound of the KV length after this step."""
    draft: int
    """Maximum number of draft tokens to verify."""
    flags: int
    """Bitwise or of RowFlag. Other per-row facts (greedy, penalties, logprobs) are in the JoinBlob."""


_FLAGS, _DRAFT = itemgetter(Row._fields.index("flags")), itemgetter(Row._fields.index("draft"))


class StepShape(NamedTuple):
    """Bounds of a step's rows, on which the choice of a CUDA graph depends. Lanes agree on the greatest of each, and
    so run the same graph."""

    tokens: int
    decodes: int
    """Decode rows."""
    chunks: int
    """Other rows, or rows that do not sample, whichever are more."""
    width: int
    """1 + most drafts of any row; 0 = there are no rows."""
    pairs: int
    """Pairs of a prompt token and a key that it may attend to."""
    guided: int
    """1 = a row with late inputs may verify drafts, so that the host reads drafts before the layers end."""
    follows: int = 1
    """StepPlan.follows; 0 without rows."""
    caught_up: int = 0
    """Tokens of all chunks with which the drafter catches up (StepPlan.catch_up)."""

    @staticmethod
    def of(rows: Sequence[Row], *, follows: bool = True) -> StepShape:
        """Return the shape of rows in canonical order. `follows`: StepPlan.follows."""
        if not rows:
            return StepShape(0, 0, 0, 0, 0, 0, 0)
        decodes = sum(1 for row in rows if row.flags & DECODE)
        moved = sum(1 for row in rows if not row.flags & SAMPLE)
        pairs, width = sum(row.count * row.bound for row in rows[decodes:]), 1 + max(map(_DRAFT, rows))
        late = width > 1 and max(map(_FLAGS, rows)) >= LATE
        return StepShape(
            sum(row.count for row in rows),
            decodes,
            max(len(rows) - decodes, moved),
            width,
            pairs,
            int(late),
            int(follows),
        )

    @staticmethod
    def greatest(shapes: Iterable[StepShape]) -> StepShape:
        """Return the greatest of each bound."""
        return StepShape(*map(max, zip(*shapes, strict=True)))


class Join(NamedTuple):
    """A sequence takes a slot. Its tokens and sampling parameters travel outside the plan, as JoinBlob (uid, epoch)."""

    slot: int
    uid: int
    epoch: int
    computed: int
    """Tokens whose KV is already in the given pages (prefix hit or fork). No step writes there."""
    again: int = 0
    """1 = the first row feeds the last of these tokens again, because the drafter needs its hidden state."""
    lacking: int = 0
    """Number of these tokens, the last ones, whose KV the drafter's own pages lack: they were computed in steps that
    the drafter did not follow."""


class PageDelta(NamedTuple):
    """Set entry `index` of the slot's page table in this group to `page`."""

    group: int
    slot: int
    index: int  # type: ignore[assignment]  # hides tuple.index
    page: int


class PageOpKind(IntEnum):
    COPY = 0
    """Copy device page src to device page dst, for every layer and plane of the group."""
    LOAD = 1
    """Copy host page src to device page dst."""
    STORE = 2
    """Copy device page src to host page dst."""


class PageOp(NamedTuple):
    """Copy of one page, before the step's forward. Operations run in list order."""

    kind: int
    group: int
    src: int
    dst: int


class CatchUp(NamedTuple):
    """Earlier tokens of a decode row that the drafter feeds to its own layers before it drafts (Drafter.catch_up)."""

    slot: int
    first: int
    """Index of the first token; the drafter has all tokens before it."""
    count: int  # type: ignore[assignment]  # hides tuple.count
    """Number of tokens. The device alone knows how many the row has; any past its last token are meaningless, and fed
    again later."""


class HostDraft(NamedTuple):
    """Draft ids computed on the host, for drafters with needs_host_tokens."""

    slot: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class StepPlan:
    """One step. The scheduler builds it, core.parallel.encoding encodes it, and every rank applies plans in `step`
    order. Row order is canonical: decode rows by slot, then prefill chunks by slot. A scheduler's plan has at least one
    row. The engine launches a plan with nothing but a step and a shape while other lanes have rows and its own has
    none: the ranks then only serve their experts."""

    step: int
    rows: list[Row]
    joins: list[Join] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    """Slots freed before the joins of this plan."""
    pages: list[PageDelta] = field(default_factory=list)
    ops: list[PageOp] = field(default_factory=list)
    drafts: list[HostDraft] = field(default_factory=list)
    lane: int = 0
    follows: bool = True
    """Whether the drafter feeds the step's chunks of prompts to its own layers. Without it, it has no drafts for these
    rows, or none until it has caught up (Drafter.resumes)."""
    catch_up: list[CatchUp] = field(default_factory=list)
    """Rows that a drafter that resumes catches up with, at most one entry per decode row of the plan. These tokens and
    those of the rows are together at most the token budget."""
    shape: StepShape | None = None
    """Greatest bounds over all lanes. The engine sets it; None = no lanes share experts with this one."""

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def late(self) -> bool:
        """Whether its sampling half waits for late inputs."""
        return max(map(_FLAGS, self.rows), default=0) >= LATE


@dataclass(frozen=True, slots=True, eq=False)
class LateInputs:
    """Sampling inputs of a launched plan that the host can compute only from earlier results."""

    step: int
    rows: tuple[int, ...]
    """Ascending indices into the plan's rows: the rows with a mask here. A LATE row that is not listed yields no token
    in this step."""
    masks_MW: NDArray[np.uint32]
    """Allowed tokens, [M, ceil(vocabulary / 32)]: bit t % 32 of word t // 32 is token t. Each listed row has one mask
    for the token after its last one and one for the token after each draft that it verifies, row by row."""
    drafts: tuple[int, ...] = ()
    """Drafts to verify of each listed row, at most Row.draft; () = none of any row."""

    def by_row(self) -> dict[int, NDArray[np.uint32]]:
        """Return the masks of each listed row, [1 + drafts, words]."""
        counts = [1 + drafts for drafts in self.drafts or (0,) * len(self.rows)]
        ends = list(accumulate(counts))
        return {row: self.masks_MW[end - count : end] for row, count, end in zip(self.rows, counts, ends, strict=True)}
