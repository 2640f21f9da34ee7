"""One group's pages: which are free, and how many sequences own each of the others."""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import KVGroup


class PageList:
    """The pages 1 .. total of one group. Every method costs O(1).

    Free pages are a stack, lowest id on top at first, so that equal calls hand out equal pages.
    """

    __slots__ = ("behind", "free", "group", "page_tokens", "refs", "total", "window")

    def __init__(self, group: KVGroup, total: int) -> None:
        self.group = group.id
        self.page_tokens, self.window, self.behind = group.page_tokens, group.window, group.pages_behind
        self.total = total
        self.refs = [0] * (total + 1)
        """Sequences that own each page. Read by PageTables, written here."""
        self.free = list(range(total, 0, -1))

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self.free)

    def free_pages(self) -> list[int]:
        """Those pages, for `check`."""
        return self.free

    @property
    def cached(self) -> int:
        """Pages that nobody owns and that are kept for reuse."""
        return 0

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return self.num_free

    @property
    def owned(self) -> int:
        return self.total - self.num_free - self.cached

    def count(self, tokens: int) -> int:
        """Pages that so many tokens fill, the last one perhaps partly."""
        return ceil_div(tokens, self.page_tokens)

    def private(self, page: int) -> bool:
        """Whether its one owner may write to it."""
        return self.refs[page] == 1

    def take(self) -> int:
        """A page for one owner. Only valid while `available` > 0."""
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more sequence owns the page."""
        self.refs[page] += 1

    def drop(self, page: int) -> None:
        """One owner less; without any the page is free."""
        self.refs[page] -= 1
        if not self.refs[page]:
            self.free.append(page)

    def overwrite(self, page: int) -> None:
        """The only owner is about to write where tokens already were: nobody may find them here any more."""

    def check(self, owners: Iterable[int]) -> None:
        """`owners` names each page once for each sequence that owns it."""
        counted = [0] * (self.total + 1)
        for page in owners:
            counted[page] += 1
        for page, (expected, refs) in enumerate(zip(counted, self.refs, strict=True)):
            expect(refs == expected, f"group {self.group}: page {page} has {expected} owners and a count of {refs}")
        expect(counted[0] == 0, f"group {self.group}: page 0 was handed out")
        free = set(self.free_pages())
        listed = self.num_free
        expect(len(free) == listed, f"group {self.group}: {listed} free pages, {len(free)} different ones")
        owned = {page for page, refs in enumerate(self.refs) if refs}
        expect(not free & owned, f"group {self.group}: pages {sorted(free & owned)[:8]} are both free and owned")
        self._check_unowned(free, owned)

    def _check_unowned(self, free: set[int], owned: set[int]) -> None:
        expect(
            len(free) + len(owned) == self.total,
            f"group {self.group}: {len(free)} free + {len(owned)} owned of {self.total} pages",
        )


def expect(condition: bool, message: str) -> None:
    """An assertion that also holds under `python -O`: integrity checks are asked for by name."""
    if not condition:
        raise AssertionError(message)
