"""Balanced layouts of experts with several copies, and the moves that lead to them. Pure functions; imports no torch.

The experts with the most load per copy get more copies, then copies are packed so that ranks have equal loads. The idea
is that of the expert-parallel load balancer of DeepSeek-V3 (2024).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Layouts = tuple[tuple[int, ...], ...]
"""Global id of the expert in each slot, by expert rank."""

LEAST_GAIN = 0.05
"""Part of the busiest rank's load that a new layout must save, or the experts stay: moves cost time, and loads vary."""


def copies_of(loads: Sequence[float], ranks: int, slots: int) -> list[int]:
    """Return the number of copies of each expert: `slots` on each rank, and no expert twice on one. An expert with the
    most load per copy gets the next one; ties go to the smallest id."""
    count = len(loads)
    assert count <= ranks * slots and slots <= count, f"{ranks} x {slots} slots cannot have {count} experts"
    copies = [1] * count
    busiest = [(-load, expert) for expert, load in enumerate(loads)] if ranks > 1 else []
    heapq.heapify(busiest)
    for _ in range(ranks * slots - count):
        _, expert = heapq.heappop(busiest)
        copies[expert] += 1
        if copies[expert] < ranks:
            heapq.heappush(busiest, (-loads[expert] / copies[expert], expert))
    return copies


def balanced(loads: Sequence[float], ranks: int, slots: int) -> Layouts:
    """Return a layout of `slots` slots on each rank, for experts with these loads, which their copies share.

    Copies are dealt in rounds, by falling load, one to each rank: the largest of a round goes to the rank that has the
    least. The loads of two ranks therefore differ by less than the largest and the smallest load of a copy do.
    """
    copies = copies_of(loads, ranks, slots)
    each = [load / count for load, count in zip(loads, copies, strict=True)]
    falling = sorted(range(len(loads)), key=lambda expert: (-each[expert], expert))
    dealt = [expert for expert in falling for _ in range(copies[expert])]
    layouts: list[list[int]] = [[] for _ in range(ranks)]
    load_of = [0.0] * ranks
    for start in range(0, len(dealt), ranks):
        free = list(range(ranks))
        for expert in dealt[start : start + ranks]:
            # Copies of one expert may be in two rounds.
            rank = min((rank for rank in free if expert not in layouts[rank]), key=lambda rank: (load_of[rank], rank))
            free.remove(rank)
            layouts[rank].append(expert)
            load_of[rank] += each[expert]
    return tuple(map(tuple, layouts))


def rank_loads(loads: Sequence[float], layouts: Layouts) -> list[float]:
    """Return the load of each rank, if the copies of an expert share its load equally."""
    copies = Counter(expert for layout in layouts for expert in layout)
    return [sum(loads[expert] / copies[expert] for expert in layout) for layout in layouts]


def rebalanced(loads: Sequence[float], layouts: Layouts) -> Layouts:
    """Return a balanced layout for these loads, in which experts that stay on a rank keep their slots; the given one if
    the busiest rank would not save LEAST_GAIN of its load. Every rank has equally many slots."""
    found = balanced(loads, len(layouts), len(layouts[0]))
    if max(rank_loads(loads, found)) >= (1 - LEAST_GAIN) * max(rank_loads(loads, layouts)):
        return layouts
    return tuple(map(_in_old_slots, layouts, found))


def _in_old_slots(old: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """Order the new experts of a rank so that as few as possible change their slot."""
    left = Counter(new)
    kept = []
    for expert in old:
        stays = left[expert] > 0
        left[expert] -= stays
        kept.append(stays)
    come = left.elements()
    return tuple(expert if stays else next(come) for expert, stays in zip(old, kept, strict=True))


SPARE = -1
"""Slot of the memory for one more expert that each rank has during moves."""


class Place(NamedTuple):
    rank: int
    slot: int


class Move(NamedTuple):
    """Copy of an expert. Moves are made in order, and overwrite what they write to."""

    source: Place
    to: Place


def moves(old: Layouts, new: Layouts) -> list[Move]:
    """Return the moves that turn one layout into another. None of them overwrites the last copy of an expert that a
    later one needs; a cycle of places is opened by saving one of them. A source on the same rank is preferred."""
    return _Moves(old, new).found


class _Moves:
    def __init__(self, old: Layouts, new: Layouts) -> None:
        self.found: list[Move] = []
        self._at = {Place(r, s): expert for r, layout in enumerate(old) for s, expert in enumerate(layout)}
        self._wanted = {
            place: new[place.rank][place.slot]
            for place, expert in self._at.items()
            if new[place.rank][place.slot] != expert
        }
        self._needs = Counter(self._wanted.values())
        self._places: dict[int, set[Place]] = defaultdict(set)
        for place, expert in self._at.items():
            self._places[expert].add(place)
        while self._wanted:
            free = [place for place in self._wanted if self._is_free(place)]
            if not free:
                self._save(self._on_a_cycle())
            for place in free:
                # Earlier moves of this pass may have overwritten the other copies.
                if self._is_free(place):
                    self._fill(place)

    def _is_free(self, place: Place) -> bool:
        """Whether nothing is lost if the place is overwritten."""
        expert = self._at[place]
        return not self._needs[expert] or len(self._places[expert]) > 1

    def _fill(self, place: Place) -> None:
        expert = self._wanted.pop(place)
        self._needs[expert] -= 1
        self._copy(self._source(expert, place.rank), place)

    def _save(self, place: Place) -> None:
        self._copy(place, Place(place.rank, SPARE))

    def _copy(self, source: Place, to: Place) -> None:
        self.found.append(Move(source, to))
        if to in self._at:
            self._places[self._at[to]].discard(to)
        self._at[to] = self._at[source]
        self._places[self._at[to]].add(to)

    def _source(self, expert: int, rank: int) -> Place:
        return min(self._places[expert], key=lambda place: (place.rank != rank, place))

    def _on_a_cycle(self) -> Place:
        """Return a place that waits for itself. Each place that is left waits for another one to copy its content."""
        waiting = {expert: place for place, expert in self._wanted.items()}
        place, seen = next(iter(self._wanted)), set()
        while place not in seen:
            seen.add(place)
            place = waiting[self._at[place]]
        return place


def busiest_and_mean(layers: Iterable[Sequence[float]]) -> tuple[float, float]:
    """Return the load of the busiest rank and the mean load of all, each as the mean over layers. `layers`: loads of
    the ranks in each layer."""
    found = [(max(loads), sum(loads) / len(loads)) for loads in layers]
    greatest, mean = (sum(column) / len(found) for column in zip(*found, strict=True))
    return greatest, mean
