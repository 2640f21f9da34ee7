"""Host-side record of the sequence in each slot of a rank, and sets that let a step test all of its rows at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Flag, auto

from dovetail.core.interfaces import JoinBlob, SamplingParams


class Draw(Flag):
    """Parts of a draw. Rows that need fewer of them cost little."""

    RANDOM = auto()
    FILTERED = auto()
    """Random, and restricted by top-k, top-p or min-p."""
    LOGPROBS = auto()
    PROCESSED = auto()
    """Logits processors run."""


GREEDY = Draw(0)
DRAWS = (
    GREEDY,
    Draw.RANDOM,
    Draw.RANDOM | Draw.FILTERED,
    Draw.RANDOM | Draw.FILTERED | Draw.LOGPROBS,
    Draw.RANDOM | Draw.FILTERED | Draw.PROCESSED,
    Draw.RANDOM | Draw.FILTERED | Draw.LOGPROBS | Draw.PROCESSED,
)
"""Draws that are captured, cheaper ones first: few, since each takes time at start-up for every number of rows."""


@dataclass(slots=True)
class SlotInfo:
    """Host-side record of the sequence in a slot, for steps. Written when the sequence joins."""

    blob: JoinBlob
    affected: tuple[str, ...] = ()
    """Logits processors with state to write: those that the slot's sequence uses or its previous one used."""
    random: bool = field(init=False)
    """Not greedy."""
    filtered: bool = field(init=False)
    """Random, and restricted by top-k, top-p or min-p."""

    def __post_init__(self) -> None:
        params = self.params
        self.random = params.temperature > 0
        self.filtered = self.random and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)

    @property
    def params(self) -> SamplingParams:
        return self.blob.request.params

    @property
    def adapter(self) -> int:
        """Slot of its adapter; -1 = none."""
        return self.blob.adapter

    @property
    def processors(self) -> tuple[str, ...]:
        """Logits processors that it uses."""
        return self.blob.request.processors


class Slots:
    """The record of each occupied slot. The sets hold slots whose sequence needs something that most do not; a step
    finds out with `isdisjoint` instead of a loop over its rows. The entries of an empty slot are meaningless."""

    def __init__(self, uncaptured: Iterable[str] = ()) -> None:
        """`uncaptured`: the logits processors that CUDA graphs cannot capture."""
        self._uncaptured = frozenset(uncaptured)
        self._infos: dict[int, SlotInfo] = {}
        self._used_processors: dict[int, tuple[str, ...]] = {}
        """Empty slots -> logits processors that their last sequence used."""
        self.random: set[int] = set()
        self.filtered: set[int] = set()
        """These two as in SlotInfo."""
        self.processed: set[int] = set()
        """The sequence uses logits processors."""
        self.uncaptured: set[int] = set()
        """One of them cannot be captured."""
        self.logprobs: set[int] = set()
        self.prompt_logprobs: set[int] = set()
        self.pooling: set[int] = set()
        """The prompt is embedded."""
        self.adapted: set[int] = set()
        """The sequence has an adapter."""

    def __getitem__(self, slot: int) -> SlotInfo:
        return self._infos[slot]

    def draw(self, slots: Collection[int]) -> Draw | None:
        """Return the captured draw that serves these slots; None = none does."""
        if not self.uncaptured.isdisjoint(slots):
            return None
        needed = GREEDY
        for need, among in (
            (Draw.RANDOM, self.random),
            (Draw.FILTERED, self.filtered),
            (Draw.LOGPROBS, self.logprobs),
            (Draw.PROCESSED, self.processed),
        ):
            if not among.isdisjoint(slots):
                needed |= need
        return next(draw for draw in DRAWS if needed in draw)

    def most_logprobs(self, slots: Collection[int]) -> int | None:
        """Return how many most likely tokens some of these slots reports; None = none reports log-probabilities."""
        if self.logprobs.isdisjoint(slots):
            return None
        return max(self._infos[slot].params.logprobs or 0 for slot in slots if slot in self.logprobs)

    def leave(self, slot: int) -> None:
        info = self._infos.pop(slot)
        if info.processors:
            self._used_processors[slot] = info.processors

    def join(self, slot: int, blob: JoinBlob) -> SlotInfo:
        used = self._used_processors.pop(slot, ())
        request, params = blob.request, blob.request.params
        info = self._infos[slot] = SlotInfo(blob, (*request.processors, *used))
        for slots, among in (
            (self.random, info.random),
            (self.filtered, info.filtered),
            (self.processed, bool(request.processors)),
            (self.uncaptured, not self._uncaptured.isdisjoint(request.processors)),
            (self.logprobs, params.logprobs is not None),
            (self.prompt_logprobs, params.prompt_logprobs is not None),
            (self.pooling, request.pooling is not None),
            (self.adapted, blob.adapter >= 0),
        ):
            (slots.add if among else slots.discard)(slot)
        return info
