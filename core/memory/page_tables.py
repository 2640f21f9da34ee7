"""PageTables: base of allocators with one page table per sequence. Tables, forks and copy-on-write, without reuse.

A subclass defines the handling of pages (its PageList) and what acquire and publish find.

Legend: a table is the list of page ids of one sequence in one group. Pages at and past ceil(written / page_tokens) are
private. So is the page that contains position `written` once reserve has allowed a write there. In a window group the
first `behind` entries are 0: those pages were released or never needed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from dovetail.core.interfaces import (
    Hit,
    KVAllocator,
    KVGroup,
    KVSequence,
    KVStats,
    PageEntry,
    PageOp,
    PageOpKind,
    Reservation,
)
from dovetail.core.memory.page_list import PageList, expect

UNCHANGED = Reservation()


@dataclass(slots=True)
class SequencePages:
    """Pages of one sequence. Written only by its PageTables."""

    tables: list[list[int]]
    """One table per group, with pages for `length` tokens, or for max(length, ahead) in a group without a window.
    Longer if the allocator sets takes_ahead."""
    length: int = 0
    """Tokens reserved."""
    ahead: int = 0
    """Tokens reserved in groups without a window, if more than length."""
    written: int = 0
    """Tokens known to be written, set by publish, acquire or fork and lowered by trim."""
    room: int = 0
    """reserve(upto <= room) changes only `length`."""
    behind: list[int] = field(default_factory=list)
    """Number of leading entries that are 0, per group."""
    next_full: int = sys.maxsize
    """publish(upto < next_full) completes no page that others may find."""
    slides_at: int = 0
    """publish(upto <= slides_at) releases no page."""

    def __post_init__(self) -> None:
        self.behind = [0] * len(self.tables)


Pages = TypeVar("Pages", bound=PageList)
State = TypeVar("State", bound=SequencePages)


class PageTables(KVAllocator, Generic[Pages, State]):
    takes_ahead = False
    """Whether tables may be longer than reserve requested."""
    slides = True
    """Whether pages behind a window are released. If false, window groups are treated like groups without a window."""

    def __init__(self, config: object, groups: Sequence[KVGroup], num_pages: Mapping[int, int]) -> None:
        if not self.slides:
            groups = [replace(group, kind="full", window=0) for group in groups]
        super().__init__(config, groups, num_pages)
        ids = [group.id for group in self.groups]
        if not ids or len(set(ids)) != len(ids) or set(ids) != set(self.num_pages):
            raise ValueError(f"groups {ids} and num_pages of {sorted(self.num_pages)}: each group needs one")
        self._pages = [self._page_list(group, self.num_pages[group.id]) for group in self.groups]
        self._states: dict[int, State] = {}

    # For subclasses.

    def _page_list(self, group: KVGroup, total: int) -> Pages:
        raise NotImplementedError

    def _new_state(self, seq: KVSequence) -> State:
        """Return a state with empty tables."""
        raise NotImplementedError

    def _register(self, seq: KVSequence) -> State:
        if seq.uid in self._states:
            raise ValueError(f"sequence {seq.uid} is already known; release it first")
        state = self._states[seq.uid] = self._new_state(seq)
        return state

    def _known(self, seq: KVSequence) -> State:
        state = self._states.get(seq.uid)
        if state is None:
            raise ValueError(f"sequence {seq.uid} is not known; acquire, fork or reserve comes first")
        return state

    def _offer_full(self, seq: KVSequence, state: State, upto: int) -> None:
        """Publish full pages that are not published yet. Called once `upto` reaches state.next_full."""
        raise NotImplementedError

    def _moves(self) -> tuple[PageOp, ...]:
        """Return the LOADs and STOREs since the last call, in order."""
        return ()

    # Contract.

    def peek(self, seq: KVSequence) -> int:
        return 0

    def acquire(self, seq: KVSequence, *, reuse: bool = True) -> Hit:
        self._register(seq)
        return Hit()

    def reserve(self, seq: KVSequence, upto: int, ahead: int = 0) -> Reservation | None:
        state = self._states.get(seq.uid)
        if state is None or upto > state.room or ahead > state.ahead:
            return self._grow(seq, upto, ahead)
        if upto > state.length:
            state.length = upto
        return UNCHANGED

    def _grow(self, seq: KVSequence, upto: int, ahead: int) -> Reservation | None:
        if upto < 0:
            raise ValueError(f"upto is {upto}")
        state = self._states.get(seq.uid)
        if state is None:
            state = self._new_state(seq)
        elif max(upto, ahead) <= state.written:
            return UNCHANGED
        ahead, written = max(upto, ahead), state.written
        needs: list[tuple[Pages, list[int], int | None, int]] = []
        for pages, table in self._by_group(state):
            target = upto if pages.window else ahead
            index = self._shared_index(pages, table, written, target)
            count = pages.count(target)
            if max(count - len(table), 0) + (index is not None) > pages.available:
                return None
            needs.append((pages, table, index, count))
        entries: list[PageEntry] = []
        copies: list[PageOp] = []
        for pages, table, index, count in needs:
            if index is not None:
                old, table[index] = table[index], pages.take()
                pages.drop(old)
                entries.append((pages.group, index, table[index]))
                copies.append(PageOp(PageOpKind.COPY, pages.group, old, table[index]))
            elif inside := written % pages.page_tokens:
                pages.overwrite(table[(written - inside) // pages.page_tokens])
            for new in range(len(table), count):
                page = pages.take()
                table.append(page)
                entries.append((pages.group, new, page))
        self._states[seq.uid] = state
        state.length, state.ahead = max(state.length, upto), max(state.ahead, ahead)
        state.room = self._capacity(state)
        # Stores come first: a page must be stored before a copy overwrites it.
        return Reservation(tuple(entries), (*self._moves(), *copies)) if entries else UNCHANGED

    def publish(self, seq: KVSequence, upto: int) -> None:
        # Called once per row and step, so `_known` is inlined.
        state = self._states.get(seq.uid) or self._known(seq)
        if upto > state.length or upto > len(seq.tokens):
            have = f"{state.length} are reserved and {len(seq.tokens)} known"
            raise ValueError(f"cannot publish {upto} tokens of sequence {seq.uid}: {have}")
        if upto > state.written:
            state.written = upto
        if upto >= state.next_full:
            self._offer_full(seq, state, upto)
        if upto > state.slides_at:
            self._slide(state, upto - 1)

    def _slide(self, state: State, position: int) -> None:
        """Release the pages that no token from `position` on attends to."""
        state.slides_at = sys.maxsize
        for number, (pages, table) in enumerate(self._by_group(state)):
            if not pages.window:
                continue
            kept = state.behind[number]
            gone = state.behind[number] = max(pages.behind(position), kept)
            for index in reversed(range(kept, gone)):
                pages.drop(table[index])
                table[index] = 0
            state.slides_at = min(state.slides_at, (gone + 1) * pages.page_tokens + pages.window - 1)

    def trim(self, seq: KVSequence, length: int) -> None:
        state = self._known(seq)
        if length < 0:
            raise ValueError(f"length is {length}")
        if length >= max(self._capacity(state), state.ahead):
            return
        if any(pages.behind(length) < gone for pages, gone in zip(self._pages, state.behind, strict=True)):
            raise ValueError(f"cannot trim sequence {seq.uid} to {length} tokens: pages behind its window are gone")
        for pages, table in self._by_group(state):
            keep = pages.count(length)
            for page in reversed(table[keep:]):
                pages.drop(page)
            del table[keep:]
        state.length, state.ahead = min(state.length, length), min(state.ahead, length)
        if length < state.written:
            # The page that contains it may be shared, so the next reserve must check.
            state.written = state.room = length
        else:
            state.room = min(state.room, self._capacity(state))

    def fork(self, parent: KVSequence, child: KVSequence, upto: int) -> Hit:
        source = self._known(parent)
        if not 0 <= upto <= source.length:
            raise ValueError(f"cannot fork {upto} tokens of sequence {parent.uid}: it has {source.length}")
        behind = [pages.behind(upto) for pages in self._pages]
        if any(gone > needed for gone, needed in zip(source.behind, behind, strict=True)):
            return self.acquire(child)
        state = self._register(child)
        state.behind = behind
        entries: list[PageEntry] = []
        for (pages, table), own, first in zip(self._by_group(source), state.tables, behind, strict=True):
            own.extend([0] * first)
            for index in range(first, pages.count(upto)):
                own.append(table[index])
                pages.add_owner(table[index])
                entries.append((pages.group, index, table[index]))
        state.length = state.written = state.room = upto
        # Forked tokens are written even if the parent has not published them. Its last page may now be shared.
        source.written = max(source.written, upto)
        source.room = min(source.room, source.written)
        return Hit(upto, tuple(entries))

    def release(self, seq: KVSequence) -> None:
        state = self._states.pop(seq.uid, None)
        if state is None:
            return
        for (pages, table), behind in zip(self._by_group(state), state.behind, strict=True):
            # Last page first: the start of a prefix is useful to more sequences, so it should be evicted later.
            for page in reversed(table[behind:]):
                pages.drop(page)

    def pages_needed(self, tokens: int, ahead: int | None = None) -> dict[int, int]:
        held = (tokens if ahead is None else group.tokens_held(tokens, ahead) for group in self.groups)
        return {pages.group: pages.count(slots) for pages, slots in zip(self._pages, held, strict=True)}

    def stats(self) -> KVStats:
        """Takes O(sequences) time."""
        owned_tokens = sum(pages.owned * pages.page_tokens for pages in self._pages)
        unused = sum(self._unused_slots(pages, position) for position, pages in enumerate(self._pages))
        return KVStats(
            pages=sum(pages.total for pages in self._pages),
            free=sum(pages.num_free for pages in self._pages),
            cached=sum(pages.cached for pages in self._pages),
            owned=sum(pages.owned for pages in self._pages),
            used_tokens=owned_tokens - unused,
            owned_tokens=owned_tokens,
        )

    def check(self) -> None:
        for position, pages in enumerate(self._pages):
            tables = {uid: state.tables[position] for uid, state in self._states.items()}
            pages.check(page for uid, table in tables.items() for page in table[self._states[uid].behind[position] :])
            for uid, table in tables.items():
                state = self._states[uid]
                where = f"sequence {uid}, group {pages.group}"
                reserved = self._reserved(pages, state)
                count = pages.count(reserved)
                expect(
                    len(table) == count or self.takes_ahead and len(table) > count,
                    f"{where}: {len(table)} pages for {reserved} tokens of {pages.page_tokens} a page",
                )
                behind = state.behind[position]
                expect(
                    not any(table[:behind]) and behind <= pages.behind(state.length),
                    f"{where}: {behind} pages behind a window of {pages.window} tokens, table {table[: behind + 1]}",
                )
                expect(state.written <= state.length, f"{where}: {state.written} written of {state.length} reserved")
                shared = [page for page in table[pages.count(state.written) :] if not pages.private(page)]
                expect(not shared, f"{where}: pages {shared[:8]} past {state.written} written tokens are shared")

    def reset(self) -> None:
        """Do nothing, since no pages are cached."""

    # Helpers.

    def _by_group(self, state: SequencePages) -> zip[tuple[Pages, list[int]]]:
        return zip(self._pages, state.tables, strict=True)

    @staticmethod
    def _reserved(pages: PageList, state: SequencePages) -> int:
        return state.length if pages.window else max(state.length, state.ahead)

    def _capacity(self, state: SequencePages) -> int:
        return min([len(table) * pages.page_tokens for pages, table in self._by_group(state)])

    def _shared_index(self, pages: Pages, table: list[int], written: int, upto: int) -> int | None:
        """Index of the page at position `written`, if shared and so to be copied before a write up to `upto`."""
        index, inside = divmod(written, pages.page_tokens)
        return index if inside and pages.refs[table[index]] > 1 else None

    def _unused_slots(self, pages: PageList, position: int) -> int:
        """Number of slots past the reserved lengths. For a shared last page, the longest owner counts."""
        # No calls in the loop, since routers ask often. Counting in `reserve` would cost more: it runs for each row.
        unused, size, window, refs = 0, pages.page_tokens, pages.window, pages.refs
        shared: dict[int, int] = {}
        for state in self._states.values():
            table, reserved = state.tables[position], state.length
            if state.ahead > reserved and not window:
                reserved = state.ahead
            unused += len(table) * size - reserved
            if (inside := reserved % size) and refs[page := table[reserved // size]] > 1:
                unused -= size - inside
                shared[page] = reserved // size
        for page, index in shared.items():
            lengths = [
                self._reserved(pages, state)
                for state in self._states.values()
                if index < len(state.tables[position]) and state.tables[position][index] == page
            ]
            unused += max((index + 1) * pages.page_tokens - max(lengths), 0)
        return unused
