"""Entries of a recording, in the order of the scheduler's calls. Their fields are the file's format: a change of any of
them is a new FORMAT."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dovetail.core.interfaces import CatchUp, Join, PageDelta, PageOp, Row

FORMAT = 2
"""Version of the format."""
READABLE = (1, FORMAT)
"""Versions that a reader takes. Version 1 has no Planned.launch_seconds."""


class PlaneFacts(msgspec.Struct, frozen=True):
    name: str
    shape: tuple[int, ...]
    dtype: str


class GroupFacts(msgspec.Struct, frozen=True):
    """A KVGroup."""

    id: int
    layers: tuple[int, ...]
    planes: tuple[PlaneFacts, ...]
    kind: str
    window: int
    page_tokens: int


class Header(msgspec.Struct, frozen=True):
    """Everything that a scheduler and an allocator are built from."""

    dovetail: str
    """Version of the package."""
    overrides: tuple[str, ...]
    config_dirs: tuple[str, ...]
    nodes: dict[str, Any]
    """The composed configuration: node -> its options."""
    model: dict[str, Any]
    """Shapes of the model, from ModelSpec."""
    device: str
    limits: dict[str, Any]
    """SchedulerLimits."""
    groups: tuple[GroupFacts, ...]
    num_pages: dict[int, int]
    adapter_slots: int
    tokens: bool
    """Token ids are those of the texts. Otherwise each is a keyed hash of the prefix that ends with it."""
    clock: float
    """Engine clock at the start of the recording, seconds."""
    time: float
    """Seconds since the epoch at that moment."""


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One entry after the header."""


class Arrived(Event, frozen=True, tag="request"):
    """A request whose first sequence is about to be added."""

    uid: int
    prompt: bytes
    """Token ids, int32."""
    arrival: float
    """Engine clock, seconds."""
    params: dict[str, Any]
    """Fields of SamplingParams that differ from the defaults; those with text only if the header's `tokens` is set."""
    has_grammar: bool
    """Whether the output has a grammar, which `params` may leave out."""
    eos_ids: tuple[int, ...]
    priority: int
    deadline: float | None
    user: str
    cache_salt: str
    """A keyed hash, unless the header's `tokens` is set."""
    hints: dict[str, float]
    pooling: str | None
    adapter: str


class Added(Event, frozen=True, tag="add"):
    """Scheduler.add."""

    uid: int
    sample: int
    parent: int | None
    limit: int


class Planned(Event, frozen=True, tag="plan"):
    """Scheduler.schedule that returned a plan, which was launched."""

    step: int
    clock: float
    """SchedulerContext.clock."""
    seconds: float
    """Host time for the decision."""
    rows: list[Row]
    joins: list[Join]
    leaves: list[int]
    pages: list[PageDelta]
    ops: list[PageOp]
    waiting: int
    """SchedulerStats after the decision."""
    running: int
    preemptions: int
    launch_seconds: float = 0.0
    """Host time of the launch, after the decision."""
    follows: bool | None = None
    """StepPlan.follows; None in recordings of versions that left it out."""
    catch_up: list[CatchUp] = []


class Idled(Event, frozen=True, tag="none"):
    """Scheduler.schedule that returned None."""

    step: int
    clock: float


class Resulted(Event, frozen=True, tag="result"):
    """Scheduler.update."""

    step: int
    clock: float
    """Engine clock when the result arrived, seconds."""
    device_seconds: float
    idle_seconds: float
    tokens: bytes
    """Ids of all rows' tokens, int32; -1 = not finite."""
    counts: list[int] | None
    """Tokens of each row; None = one each."""
    drafted: list[int] | None
    """Drafts verified by each row; None = none."""


class Ended(Event, frozen=True, tag="end"):
    """Scheduler.finish or abort."""

    uid: int
    clock: float
    keep_len: int
    reason: Literal["stop", "length", "abort", "rejected"]
    """FinishReason. "abort": Scheduler.abort."""


class Emptied(Event, frozen=True, tag="reset"):
    """KVAllocator.reset."""

    clock: float


AnyEvent = Arrived | Added | Planned | Idled | Resulted | Ended | Emptied
