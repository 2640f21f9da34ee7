"""PageLedger: which slots name which KV pages. It rejects a plan that writes to a page with several owners."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq

from dovetail.core.interfaces import KVGroup, PageDelta, PageOpKind, Row, Sequence, StepPlan
from dovetail.core.interfaces.plan import DECODE, LATE

_MANY = 1 << 60
"""Number of names of page 0, which no slot may name."""


class PageLedger:
    """Page tables of all slots as the plans state them. Several slots may name a page only at the same index, and no
    row may write to it meanwhile.

    A plan costs O(new page-table entries). Two kinds of names are outdated by calls that no plan shows: pages that left
    an attention window, and pages past a sequence's end that `trim` gave back. Such a name is dropped when its page
    gets another one.
    """

    def __init__(self, groups: Seq[KVGroup], num_pages: Mapping[int, int], slots: int, lookahead: int) -> None:
        self._groups = {group.id: group for group in groups}
        self._most_fed = 1 + lookahead
        self._tables: dict[int, list[list[int]]] = {group: [[] for _ in range(slots)] for group in self._groups}
        """Group -> slot -> pages by index; 0 = none."""
        self._names = {group: [_MANY] + [0] * num_pages[group] for group in self._groups}
        """Group -> page -> number of entries in the tables."""
        self._newest = {group: [-1] * (num_pages[group] + 1) for group in self._groups}
        """Group -> page -> slot that named it last."""
        self._holders: list[Sequence | None] = [None] * slots
        self._given = [0] * slots
        """Tokens of each slot whose KV it found in its pages. It does not write there, even if it feeds one again."""
        self._open: dict[tuple[int, int], int] = {}
        """(group, page) -> index of shared pages that some holder has not filled yet."""
        self._lost: dict[tuple[int, int, int], int] = {}
        """(slot, group, index) -> page of names that were dropped as trimmed."""

    def apply(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> str | None:
        """Apply a plan. Return what is wrong with its pages, or None. `sequences`: those that join, by uid."""
        for slot in plan.leaves:
            self._leave(slot)
        for slot, uid, _, computed, *_ in plan.joins:
            self._holders[slot], self._given[slot] = sequences[uid], computed
        shared: list[tuple[int, int, PageDelta]] = []
        tables, names, newest = self._tables, self._names, self._newest
        for delta in plan.pages:
            group, slot, index, page = delta
            table, counts, slots = tables[group][slot], names[group], newest[group]
            if index == len(table):
                table.append(page)
            else:
                self._replace(group, table, index, page)
            try:
                count = counts[page] = counts[page] + 1
            except IndexError:
                return f"page {page} of group {group} does not exist: the group has pages 1 to {len(counts) - 1}"
            if count > 1:
                shared.append((count, slots[page], delta))
            slots[page] = slot
        if shared or self._open or self._lost or plan.ops:
            return self._examine(plan, shared)
        return None

    def _leave(self, slot: int) -> None:
        self._holders[slot] = None
        for group, tables in self._tables.items():
            names = self._names[group]
            for page in tables[slot]:
                names[page] -= 1
            tables[slot] = []
        if self._lost:
            self._lost = {key: page for key, page in self._lost.items() if key[0] != slot}

    def _replace(self, group: int, table: list[int], index: int, page: int) -> None:
        """Set an entry that exists, or that follows a gap, since a hit in a window group begins at the window."""
        table += [0] * (index + 1 - len(table))
        self._names[group][table[index]] -= 1
        table[index] = page

    def _examine(self, plan: StepPlan, shared: list[tuple[int, int, PageDelta]]) -> str | None:
        chunks: dict[int, int] = {}
        for row in reversed(plan.rows):
            if row.flags & DECODE:
                break
            chunks[row.slot] = max(row.bound - row.count, self._given[row.slot])
        for count, before, delta in shared:
            group, slot, index, page = delta
            filled = (index + 1) * self._groups[group].page_tokens <= chunks.get(slot, -1)
            # The usual case: a prefix that several sequences already read.
            if count > 2 and filled and before != slot:
                continue
            if (fault := self._share(before, delta, chunks)) is not None:
                return fault
        for kind, group, _, page in plan.ops:
            if kind == PageOpKind.COPY and self._names[group][page] > 1:
                return self._fault(group, page, "a COPY overwrites it")
        return self._check_rows(plan.rows) if self._open or self._lost else None

    def _share(self, before: int, delta: PageDelta, chunks: Mapping[int, int]) -> str | None:
        """Judge an entry whose page had a name already."""
        group, slot, index, page = delta
        if not page:
            return f"{self._who(slot)} gets page 0 of group {group}, which belongs to the core"
        # Entries of one plan have no order: a later one may have replaced this one.
        if self._tables[group][slot][index] != page:
            return None
        end = (index + 1) * self._groups[group].page_tokens
        filled = self._first_write(slot, chunks) >= end
        for other, place in self._others(before, delta):
            if place == index and filled and self._first_write(other, chunks) >= end:
                continue
            if self._drop_outdated(group, other, place):
                continue
            if place != index:
                what = f"it gives page {place} of {self._who(other)} to {self._who(slot)} as page {index}"
                return self._fault(group, page, what)
            self._open[group, page] = index
        return None

    def _others(self, before: int, delta: PageDelta) -> list[tuple[int, int]]:
        """Return (slot, index) of the other entries with this page."""
        group, slot, index, page = delta
        tables = self._tables[group]
        found: list[tuple[int, int]] = []
        # With two names the other one is almost always the newest before this one.
        for searched in ((before,), range(len(tables))) if self._names[group][page] == 2 else (range(len(tables)),):
            found = [(other, place) for other in searched for place in _places(page, tables[other])]
            found = [entry for entry in found if entry != (slot, index)]
            if found:
                break
        return found

    def _first_write(self, slot: int, chunks: Mapping[int, int]) -> int:
        """Lower bound of the positions that this plan and later ones write."""
        if slot in chunks:
            return chunks[slot]
        holder = self._holders[slot]
        return 0 if holder is None else max(holder.computed - self._most_fed, self._given[slot])

    def _drop_outdated(self, group: int, slot: int, index: int) -> bool:
        """Drop a name if its sequence no longer needs the page. Return whether it did."""
        holder, layers = self._holders[slot], self._groups[group]
        assert holder is not None, f"slot {slot} names pages but has no sequence"
        trimmed = index * layers.page_tokens >= holder.computed
        if not trimmed and index >= layers.pages_behind(min(holder.computed, holder.known_len) - 1):
            return False
        table = self._tables[group][slot]
        page, table[index] = table[index], 0
        self._names[group][page] -= 1
        if trimmed:
            self._lost[slot, group, index] = page
        return True

    def _check_rows(self, rows: Seq[Row]) -> str | None:
        """Find a row that writes to a page of another sequence, or needs a page that was given to another."""
        by_slot = {row.slot: row for row in rows}
        for (slot, group, index), page in list(self._lost.items()):
            if self._tables[group][slot][index]:
                del self._lost[slot, group, index]
            elif slot in by_slot and by_slot[slot].bound > index * self._groups[group].page_tokens:
                return self._fault(group, page, f"it was given to another sequence while {self._who(slot)} needs it")
        for (group, page), index in list(self._open.items()):
            size, filled = self._groups[group].page_tokens, True
            holders = [slot for slot, table in enumerate(self._tables[group]) if _names(table, index, page)]
            for slot in holders if len(holders) > 1 else ():
                row = by_slot.get(slot)
                if row is None:
                    filled &= self._first_write(slot, {}) >= (index + 1) * size
                    continue
                # A row that lacked its mask feeds its last token again, which changes nothing.
                first = max(row.bound - row.count + bool(row.flags & LATE), self._given[slot])
                filled &= first >= (index + 1) * size
                if first < (index + 1) * size and row.bound > index * size:
                    owners = " and ".join(self._who(holder) for holder in holders)
                    return self._fault(group, page, f"{self._who(slot)} writes to it, but {owners} share it")
            if filled:
                del self._open[group, page]
        return None

    def _who(self, slot: int) -> str:
        holder = self._holders[slot]
        return f"slot {slot}" if holder is None else f"request {holder.request.uid}, sample {holder.sample}"

    @staticmethod
    def _fault(group: int, page: int, what: str) -> str:
        return f"page {page} of group {group} has two owners: {what}"


def _names(table: list[int], index: int, page: int) -> bool:
    return index < len(table) and table[index] == page


def _places(page: int, table: list[int]) -> Iterator[int]:
    """Yield the indices of a page in a table."""
    if page in table:
        yield from (index for index, named in enumerate(table) if named == page)
