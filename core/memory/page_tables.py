"""PageTables: what allocators with one page table per sequence share. Tables, forks, copy-on-write; no reuse.

A subclass says what becomes of pages (its PageList) and what acquire and publish find.

Legend: a table is the list of page ids of one sequence in one group. Pages at and past ceil(written / page_tokens) are
private, and so is the page that `written` lies inside once reserve has let the sequence write there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """What one sequence owns. Written by its PageTables alone."""

    tables: list[list[int]]
    """One per group, ceil(length / page_tokens) pages each, or more if the allocator takes ahead."""
    length: int = 0
    """Tokens reserved."""
    written: int = 0
    """Tokens known to be written: by publish, acquire or fork; lowered by trim."""
    room: int = 0
    """reserve(upto <= room) changes nothing but length."""


Pages = TypeVar("Pages", bound=PageList)
State = TypeVar("State", bound=SequencePages)


class PageTables(KVAllocator, Generic[Pages, State]):
    takes_ahead = False
    """Whether tables may be longer than reserve asked for."""

    def __init__(self, config: object, groups: Sequence[KVGroup], num_pages: Mapping[int, int]) -> None:
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
        """A state with empty tables."""
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

    # Contract.

    def peek(self, seq: KVSequence) -> int:
        return 0

    def acquire(self, seq: KVSequence, *, reuse: bool = True) -> Hit:
        self._register(seq)
        return Hit()

    def reserve(self, seq: KVSequence, upto: int) -> Reservation | None:
        state = self._states.get(seq.uid)
        if state is None or upto > state.room:
            return self._grow(seq, upto)
        if upto > state.length:
            state.length = upto
        return UNCHANGED

    def _grow(self, seq: KVSequence, upto: int) -> Reservation | None:
        if upto < 0:
            raise ValueError(f"upto is {upto}")
        state = self._states.get(seq.uid)
        if state is None:
            state = self._new_state(seq)
        elif upto <= state.written:
            return UNCHANGED
        shared = [self._shared_index(pages, table, state.written, upto) for pages, table in self._by_group(state)]
        for (pages, table), index in zip(self._by_group(state), shared, strict=True):
            missing = max(pages.count(upto) - len(table), 0)
            if missing + (index is not None) > pages.available:
                return None
        entries: list[PageEntry] = []
        ops: list[PageOp] = []
        for (pages, table), index in zip(self._by_group(state), shared, strict=True):
            if index is not None:
                old, table[index] = table[index], pages.take()
                pages.drop(old)
                entries.append((pages.group, index, table[index]))
                ops.append(PageOp(PageOpKind.COPY, pages.group, old, table[index]))
            elif inside := state.written % pages.page_tokens:
                pages.overwrite(table[(state.written - inside) // pages.page_tokens])
            for new in range(len(table), pages.count(upto)):
                table.append(pages.take())
                entries.append((pages.group, new, table[new]))
        self._states[seq.uid] = state
        state.length = max(state.length, upto)
        state.room = self._capacity(state)
        return Reservation(tuple(entries), tuple(ops)) if entries else UNCHANGED

    def publish(self, seq: KVSequence, upto: int) -> None:
        self._mark_written(seq, upto)

    def _mark_written(self, seq: KVSequence, upto: int) -> State:
        state = self._known(seq)
        if upto > state.length or upto > len(seq.tokens):
            have = f"{state.length} are reserved and {len(seq.tokens)} known"
            raise ValueError(f"cannot publish {upto} tokens of sequence {seq.uid}: {have}")
        if upto > state.written:
            state.written = upto
        return state

    def trim(self, seq: KVSequence, length: int) -> None:
        state = self._known(seq)
        if length < 0:
            raise ValueError(f"length is {length}")
        if length >= self._capacity(state):
            return
        for pages, table in self._by_group(state):
            keep = pages.count(length)
            for page in reversed(table[keep:]):
                pages.drop(page)
            del table[keep:]
        state.length = min(state.length, length)
        if length < state.written:
            # The page it lies in may be shared, so the next reserve has to look.
            state.written = state.room = length
        else:
            state.room = min(state.room, self._capacity(state))

    def fork(self, parent: KVSequence, child: KVSequence, upto: int) -> Hit:
        source = self._known(parent)
        if not 0 <= upto <= source.length:
            raise ValueError(f"cannot fork {upto} tokens of sequence {parent.uid}: it has {source.length}")
        state = self._register(child)
        entries: list[PageEntry] = []
        for (pages, table), own in zip(self._by_group(source), state.tables, strict=True):
            own.extend(table[: pages.count(upto)])
            for index, page in enumerate(own):
                pages.share(page)
                entries.append((pages.group, index, page))
        state.length = state.written = state.room = upto
        # Forked tokens are written, whether or not the parent has published them; its last page may be shared now.
        source.written = max(source.written, upto)
        source.room = min(source.room, source.written)
        return Hit(upto, tuple(entries))

    def release(self, seq: KVSequence) -> None:
        state = self._states.pop(seq.uid, None)
        if state is None:
            return
        for pages, table in self._by_group(state):
            # Last page first: the start of a prefix is of use to more sequences, so it should be evicted later.
            for page in reversed(table):
                pages.drop(page)

    def pages_needed(self, tokens: int) -> dict[int, int]:
        return {pages.group: pages.count(tokens) for pages in self._pages}

    def stats(self) -> KVStats:
        """O(sequences)."""
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
            pages.check(page for table in tables.values() for page in table)
            for uid, table in tables.items():
                state = self._states[uid]
                where = f"sequence {uid}, group {pages.group}"
                count = pages.count(state.length)
                expect(
                    len(table) == count or self.takes_ahead and len(table) > count,
                    f"{where}: {len(table)} pages for {state.length} tokens of {pages.page_tokens} a page",
                )
                expect(state.written <= state.length, f"{where}: {state.written} written of {state.length} reserved")
                shared = [page for page in table[pages.count(state.written) :] if not pages.private(page)]
                expect(not shared, f"{where}: pages {shared[:8]} past {state.written} written tokens are shared")

    def reset(self) -> None:
        """Nothing is cached."""

    # Helpers.

    def _by_group(self, state: SequencePages) -> zip[tuple[Pages, list[int]]]:
        return zip(self._pages, state.tables, strict=True)

    def _capacity(self, state: SequencePages) -> int:
        return min(len(table) * pages.page_tokens for pages, table in self._by_group(state))

    def _shared_index(self, pages: Pages, table: list[int], written: int, upto: int) -> int | None:
        """Where the page is that `written` lies inside, if it must be copied before a write up to `upto`: somebody else
        owns it too."""
        index, inside = divmod(written, pages.page_tokens)
        return index if inside and pages.refs[table[index]] > 1 else None

    def _unused_slots(self, pages: PageList, position: int) -> int:
        """Slots past the reserved length. Of a last page that is shared the longest owner counts."""
        unused = 0
        shared: dict[int, int] = {}
        for state in self._states.values():
            table, count = state.tables[position], pages.count(state.length)
            unused += (len(table) - count) * pages.page_tokens
            gap = count * pages.page_tokens - state.length
            if gap and pages.refs[table[count - 1]] == 1:
                unused += gap
            elif gap:
                shared[table[count - 1]] = count - 1
        for page, index in shared.items():
            lengths = [
                state.length
                for state in self._states.values()
                if index < len(state.tables[position]) and state.tables[position][index] == page
            ]
            unused += max((index + 1) * pages.page_tokens - max(lengths), 0)
        return unused
