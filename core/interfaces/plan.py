"""StepPlan: everything the ranks must be told to run one step, and nothing about token values.

A plan is a diff: joins, leaves and page deltas change persistent device state; rows say what runs. Lengths in rows are
upper bounds where the device decides (speculation with plans in flight); the device knows the exact ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RowFlag(IntFlag):
    SAMPLE = 1
    """Sample after this row's last token."""
    DECODE = 2
    """The row feeds the last sampled token and its drafts; where it starts and how many drafts it has, the device
    knows."""
    LATE = 4
    """The row samples once its late inputs have come (LateInputs). Set by the engine, on rows that sample; such a row
    has no drafts."""


SAMPLE, DECODE, LATE = int(RowFlag.SAMPLE), int(RowFlag.DECODE), int(RowFlag.LATE)
DECODE_AND_SAMPLE = DECODE | SAMPLE
"""Plain integers for code that runs once per row: `&` on an IntFlag takes half a microsecond."""


class Row(NamedTuple):
    """One sequence's share of a step."""

    slot: int
    uid: int
    epoch: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody asks of a row
    """Tokens fed: exact for a chunk, 1 + draft at most for a decode row."""
    bound: int
    """KV length after this step at most."""
    draft: int
    """Draft tokens verified at most."""
    flags: int
    """RowFlag. What else a rank must know of a row (greedy, penalties, logprobs) came with the join's blob."""


_FLAGS = itemgetter(Row._fields.index("flags"))


class Join(NamedTuple):
    """A sequence takes a slot. Its token ids and sampling parameters travel beside the plan as the blob (uid,
    epoch)."""

    slot: int
    uid: int
    epoch: int
    computed: int
    """Tokens whose KV is already in the pages given (prefix hit or fork)."""


class PageDelta(NamedTuple):
    """Entry `index` of the slot's page table in this group becomes `page`."""

    group: int
    slot: int
    index: int  # type: ignore[assignment]  # hides tuple.index
    page: int


class PageOpKind(IntEnum):
    COPY = 0
    """Device page to device page, every layer and plane of the group."""
    LOAD = 1
    """Host page src to device page dst."""
    STORE = 2
    """Device page src to host page dst."""


class PageOp(NamedTuple):
    """Moves one page before the step's forward runs, in list order."""

    kind: int
    group: int
    src: int
    dst: int


class HostDraft(NamedTuple):
    """Draft ids found on the host, for drafters that need host tokens."""

    slot: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class StepPlan:
    """One step. Built by a scheduler, encoded by core.engine.encoding, applied by every rank in `step` order.

    It has at least one row. Rows stand in canonical order: decode rows by slot, then chunks by slot.
    """

    step: int
    rows: list[Row]
    joins: list[Join] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    """Slots given up before the joins of this plan."""
    pages: list[PageDelta] = field(default_factory=list)
    ops: list[PageOp] = field(default_factory=list)
    drafts: list[HostDraft] = field(default_factory=list)
    lane: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def late(self) -> bool:
        """Its second half waits for late inputs."""
        return max(map(_FLAGS, self.rows), default=0) >= LATE


@dataclass(frozen=True, slots=True, eq=False)
class LateInputs:
    """What rows of a launched plan need for sampling and the host learns only from earlier results."""

    step: int
    rows: tuple[int, ...]
    """Indices into the plan's rows, rising: those whose mask is here. A LATE row that is missing sits this step out."""
    masks_MW: NDArray[np.uint32]
    """Which tokens each of them may sample, [rows, ceil(vocabulary / 32)]: bit t % 32 of word t // 32 is token t."""
