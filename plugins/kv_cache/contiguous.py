"""One run of pages for a sequence's greatest length, taken at admission: the KV cache before paged attention.

It is the baseline of PagedAttention (Kwon et al. 2023, section 3). It wastes 60 to 80 % of the memory: slots reserved
for tokens that come later or never, and free pages in runs that are too short.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

from dovetail.core.interfaces import KVGroup, KVSequence, PageEntry, PageOp, PageOpKind, Reservation
from dovetail.core.memory.page_list import PageList, expect
from dovetail.core.memory.page_tables import UNCHANGED, PageTables, SequencePages


class PageRuns(PageList):
    """Free pages as gaps between owned runs, first fit. A call costs O(gaps); there are about as many as sequences."""

    __slots__ = ("_num_free", "gaps")

    def __init__(self, group: KVGroup, total: int) -> None:
        super().__init__(group, 0)
        self.total = total
        self.refs = [0] * (total + 1)
        self.gaps = [range(1, total + 1)] if total else []
        """Free pages, lowest first; no two gaps touch."""
        self._num_free = total

    @property
    def num_free(self) -> int:
        return self._num_free

    def free_pages(self) -> list[int]:
        return [page for gap in self.gaps for page in gap]

    def find(self, count: int) -> range | None:
        """Return the first free run of `count` pages."""
        return next((gap[:count] for gap in self.gaps if len(gap) >= count), None)

    def after(self, page: int, count: int) -> range | None:
        """Return the run of `count` pages that follows a page, if it is free."""
        index = bisect_left(self.gaps, page + 1, key=lambda gap: gap.start)
        if index == len(self.gaps) or self.gaps[index].start != page + 1 or len(self.gaps[index]) < count:
            return None
        return self.gaps[index][:count]

    def take_run(self, run: range) -> None:
        """Take a run for one owner. It is the start of a gap, as returned by `find` and `after`."""
        index = bisect_left(self.gaps, run.start, key=lambda gap: gap.start)
        rest = self.gaps[index][len(run) :]
        self.gaps[index : index + 1] = [rest] if rest else []
        self._num_free -= len(run)
        for page in run:
            self.refs[page] = 1

    def drop(self, page: int) -> None:
        self.refs[page] -= 1
        if self.refs[page]:
            return
        self._num_free += 1
        index = bisect_left(self.gaps, page, key=lambda gap: gap.start)
        start, stop, first = page, page + 1, index
        if index and self.gaps[index - 1].stop == page:
            start, first = self.gaps[index - 1].start, index - 1
        if index < len(self.gaps) and self.gaps[index].start == stop:
            stop, index = self.gaps[index].stop, index + 1
        self.gaps[first:index] = [range(start, stop)]


class ContiguousAllocator(PageTables[PageRuns, SequencePages]):
    """A sequence that outgrows its run extends it where the following pages are free. Otherwise it is copied to a new
    run.

    Sharing ends with the first write: a fork that grows moves to a separate run, prompt included. Pages that have left
    an attention window stay in the run.
    """

    takes_ahead = True
    slides = False

    def _page_list(self, group: KVGroup, total: int) -> PageRuns:
        return PageRuns(group, total)

    def _new_state(self, seq: KVSequence) -> SequencePages:
        return SequencePages([[] for _ in self.groups])

    def _grow(self, seq: KVSequence, upto: int, ahead: int) -> Reservation | None:
        if upto < 0:
            raise ValueError(f"upto is {upto}")
        upto = max(upto, ahead)
        state = self._states.get(seq.uid) or self._new_state(seq)
        if upto <= state.written and seq.uid in self._states:
            return UNCHANGED
        found: list[tuple[range, bool]] = []
        for pages, table in self._by_group(state):
            run, moves = self._run(pages, table, state.written, upto, max(upto, seq.limit))
            if run is None:
                return None
            found.append((run, moves))
        entries: list[PageEntry] = []
        ops: list[PageOp] = []
        for (pages, table), (run, moves) in zip(self._by_group(state), found, strict=True):
            if not run:
                continue
            pages.take_run(run)
            if moves:
                old, table[:] = table[:], []
                # Copies everything reserved: plans in flight write past `written` and run before these copies.
                for src, dst in zip(old[: pages.count(state.length)], run, strict=False):
                    ops.append(PageOp(PageOpKind.COPY, pages.group, src, dst))
                for page in reversed(old):
                    pages.drop(page)
            entries += [(pages.group, len(table) + i, page) for i, page in enumerate(run)]
            table.extend(run)
        self._states[seq.uid] = state
        state.length = max(state.length, upto)
        state.room = self._capacity(state)
        return Reservation(tuple(entries), tuple(ops)) if entries else UNCHANGED

    def _run(self, pages: PageRuns, table: list[int], written: int, upto: int, limit: int) -> tuple[range | None, bool]:
        """Return (run to take, whether to move there): an empty run if the present one suffices, None if none free."""
        missing = pages.count(upto) - len(table)
        if self._shared_index(pages, table, written, upto) is None:
            if missing <= 0:
                return range(0), False
            if table and (run := pages.after(table[-1], missing)):
                return run, False
        return pages.find(pages.count(limit)), True

    def check(self) -> None:
        super().check()
        for pages, position in zip(self._pages, range(len(self._pages)), strict=True):
            touching = [(a, b) for a, b in pairwise(pages.gaps) if a.stop >= b.start]
            expect(not touching, f"group {pages.group}: gaps {touching[:4]} touch or overlap")
            for uid, state in self._states.items():
                table = state.tables[position]
                apart = [(a, b) for a, b in pairwise(table) if b != a + 1]
                expect(not apart, f"sequence {uid}, group {pages.group}: pages {apart[:4]} do not follow each other")
