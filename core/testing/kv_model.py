"""Reference model for the KV suites: sequences, page layouts, and a memory that holds tokens instead of KV."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import Hit, KVAllocator, KVGroup, PageEntry, PageOp, PageOpKind, Reservation


@dataclass(slots=True, eq=False)
class TokenSequence:
    """Minimal KVSequence."""

    uid: int
    tokens: list[int]
    salt: str = ""
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """KV groups and the number of pages of each."""

    groups: tuple[KVGroup, ...]
    num_pages: Mapping[int, int]

    @property
    def stride(self) -> int:
        """Number of tokens that fills whole pages in every group (page sizes are powers of two)."""
        return max(group.page_tokens for group in self.groups)

    @property
    def capacity(self) -> int:
        """Maximum length of one sequence in tokens."""
        return min(self.num_pages[group.id] * group.page_tokens for group in self.groups)


def layout(**pages: tuple[int, ...]) -> Layout:
    """Return groups 0, 1, ... of one layer each: layout(a=(page_tokens, pages), b=(page_tokens, pages, window))."""
    groups = tuple(
        KVGroup(id=i, layers=(i,), kind="window" if window else "full", window=sum(window), page_tokens=size)
        for i, (size, _, *window) in enumerate(pages.values())
    )
    return Layout(groups, {i: count for i, (_, count, *_) in enumerate(pages.values())})


LAYOUTS = {
    "one_group": layout(a=(4, 12)),
    "uneven_pages": layout(a=(4, 14), b=(4, 9)),
    "mixed_page_sizes": layout(a=(4, 13), b=(8, 6)),
}
SLIDING = {
    "one_window": layout(a=(4, 8, 6)),
    "full_and_window": layout(a=(4, 14), b=(4, 9, 5)),
    "two_windows_and_page_sizes": layout(a=(4, 8, 9), b=(8, 8), c=(4, 9, 1)),
}


class Prefixes:
    """Ids of prefixes. The shadow memory stores these, since KV depends on the salt and on all earlier tokens."""

    def __init__(self) -> None:
        self._ids: dict[tuple[object, object], int] = {}

    def of(self, salt: str, tokens: Iterable[int]) -> list[int]:
        """Return one id per token, equal if the salt, the token and all earlier tokens are equal."""
        ids: list[int] = []
        parent: object = salt
        for token in tokens:
            parent = self._ids.setdefault((parent, token), len(self._ids))
            ids.append(parent)
        return ids


GARBAGE = -1
"""Content of a slot that a rejected draft has written."""


@dataclass(slots=True)
class ShadowMemory:
    """Page tables and page contents of a device that applies the outcome of every call in order."""

    layout: Layout
    tables: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    """uid -> group -> page ids."""
    _device: dict[tuple[int, int], list[int | None]] = field(default_factory=dict)
    _host: dict[tuple[int, int], list[int | None]] = field(default_factory=dict)

    def apply(self, uid: int, entries: Iterable[PageEntry], ops: Iterable[PageOp]) -> None:
        """Apply an outcome. Entries must name usable pages and extend or replace the table without a gap."""
        tables = self.tables.setdefault(uid, {group.id: [] for group in self.layout.groups})
        windows = {group.id: group.window for group in self.layout.groups}
        sizes = {group.id: group.page_tokens for group in self.layout.groups}
        for group, index, page in entries:
            table = tables[group]
            last = self.layout.num_pages[group]
            assert 1 <= page <= last, f"group {group} has pages 1 to {last}, but an entry names page {page}"
            if windows[group] and not table:
                table += [0] * index
            assert 0 <= index <= len(table), f"group {group}: entry {index} leaves a gap in a table of {len(table)}"
            table[index : index + 1] = [page]
        for group, table in tables.items():
            owned = [page for page in table if page]
            assert len(set(owned)) == len(owned), f"group {group}: sequence {uid} has a page twice in {table}"
        for kind, group, src, dst in ops:
            assert 0 not in (src, dst), f"page 0 is reserved for padding, but an operation of group {group} uses it"
            reads, writes = {
                PageOpKind.COPY: (self._device, self._device),
                PageOpKind.LOAD: (self._host, self._device),
                PageOpKind.STORE: (self._device, self._host),
            }[PageOpKind(kind)]
            unwritten: list[int | None] = [None] * sizes[group]
            assert kind == PageOpKind.COPY or (group, src) in reads, f"group {group}: page {src} has no KV to move"
            writes[group, dst] = list(reads.get((group, src), unwritten))

    def write(self, uid: int, start: int, contents: Iterable[int]) -> None:
        """Write to positions start, start + 1, ... in every group."""
        contents = list(contents)
        for group in self.layout.groups:
            table = self.tables[uid][group.id]
            for position, value in enumerate(contents, start):
                page, slot = table[position // group.page_tokens], position % group.page_tokens
                assert page, f"group {group.id}: sequence {uid} writes position {position}, whose page was freed"
                self._device.setdefault((group.id, page), [None] * group.page_tokens)[slot] = value

    def expect(self, uid: int, contents: list[int]) -> None:
        """Assert that the sequence reads these contents in every group, as far back as the next token attends."""
        for group in self.layout.groups:
            table, size = self.tables[uid][group.id], group.page_tokens
            read: list[int | None] = []
            for page in table[: ceil_div(len(contents), size)]:
                read += self._device.get((group.id, page), [None] * size)
            first = max(len(contents) - group.window + 1, 0) if group.window else 0
            bad = next((p for p in range(first, len(contents)) if p >= len(read) or read[p] != contents[p]), None)
            assert bad is None, (
                f"group {group.id}: sequence {uid} does not read its own token at position {bad} (page table {table})"
            )

    def slide(self, uid: int, position: int) -> None:
        """Free the pages that no token from `position` on attends to."""
        for group in self.layout.groups:
            table = self.tables[uid][group.id]
            behind = group.pages_behind(position)
            table[:behind] = [0] * behind

    def shortest(self, uid: int) -> int:
        """Smallest length at which the sequence may be trimmed or forked."""
        gone = {group: self.tables[uid][group.id].count(0) for group in self.layout.groups}
        return max(n * group.page_tokens + group.window - 1 if n else 0 for group, n in gone.items())

    def trim(self, uid: int, length: int) -> None:
        for group in self.layout.groups:
            del self.tables[uid][group.id][ceil_div(length, group.page_tokens) :]

    def drop(self, uid: int) -> None:
        self.tables.pop(uid, None)

    def owners(self, group: int) -> Counter[int]:
        """Return page -> number of page tables that name it."""
        return Counter(page for tables in self.tables.values() for page in tables[group] if page)


def sequence(uid: int, tokens: int, *, first: int = 0, salt: str = "") -> TokenSequence:
    """Return a sequence with the tokens first, first + 1, ..."""
    return TokenSequence(uid, list(range(first, first + tokens)), salt)


def reserve(kv: KVAllocator, seq: TokenSequence, upto: int, ahead: int = 0) -> Reservation:
    made = kv.reserve(seq, upto, ahead)
    assert made is not None, f"reserve({upto}) returned None although there are enough pages: {kv.stats()}"
    return made


def write(kv: KVAllocator, seq: TokenSequence) -> dict[int, list[int]]:
    """Acquire, reserve and publish all tokens of the sequence. Return its pages by group."""
    hit = kv.acquire(seq)
    made = reserve(kv, seq, len(seq.tokens))
    kv.publish(seq, len(seq.tokens))
    return owned_pages(hit, made)


def live(kv: KVAllocator, seq: TokenSequence, child: TokenSequence) -> None:
    """Call each method once."""
    kv.peek(seq)
    write(kv, seq)
    kv.fork(seq, child, 10)
    reserve(kv, child, 30)
    kv.trim(child, 12)
    kv.stats()
    kv.release(child)
    kv.release(seq)


def owned_pages(*outcomes: Hit | Reservation) -> dict[int, list[int]]:
    """Return group -> pages, in the order of their entries."""
    entries: list[PageEntry] = list(itertools.chain.from_iterable(outcome.entries for outcome in outcomes))
    return {group: [page for g, _, page in entries if g == group] for group in sorted({g for g, _, _ in entries})}
