"""Free list and reference counts of one group's pages."""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import KVGroup


class PageList:
    """Pages 1 .. total of one group. Every method but check takes O(1) time. Free pages form a stack, initially with
    the lowest id on top, so equal calls return equal pages."""

    __slots__ = ("behind", "free", "group", "page_tokens", "refs", "total", "window")

    def __init__(self, group: KVGroup, total: int) -> None:
        self.group = group.id
        self.page_tokens, self.window, self.behind = group.page_tokens, group.window, group.pages_behind
        self.total = total
        self.refs = [0] * (total + 1)
        """Number of sequences that own each page. Read by PageTables, written here."""
        self.free = list(range(total, 0, -1))

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self.free)

    def free_pages(self) -> list[int]:
        """List the free pages, for `check`."""
        return self.free

    @property
    def cached(self) -> int:
        """Number of pages without an owner that are kept for reuse."""
        return 0

    @property
    def available(self) -> int:
        """Number of pages that `take` can return."""
        return self.num_free

    @property
    def owned(self) -> int:
        return self.total - self.num_free - self.cached

    def count(self, tokens: int) -> int:
        """Number of pages for `tokens` tokens, rounded up."""
        return ceil_div(tokens, self.page_tokens)

    def private(self, page: int) -> bool:
        """Whether the page has a single owner, which may write to it."""
        return self.refs[page] == 1

    def take(self) -> int:
        """Return a page with one owner. Only valid while `available` > 0."""
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def add_owner(self, page: int) -> None:
        """Increment the page's reference count."""
        self.refs[page] += 1

    def drop(self, page: int) -> None:
        """Decrement the page's reference count and free it at 0."""
        self.refs[page] -= 1
        if not self.refs[page]:
            self.free.append(page)

    def overwrite(self, page: int) -> None:
        """Withdraw a published page that its only owner is about to overwrite."""

    def check(self, owners: Iterable[int]) -> None:
        """Check integrity. `owners` contains each page once per sequence that owns it."""
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
    """Assertion that also runs under `python -O`, since integrity checks are called explicitly."""
    if not condition:
        raise AssertionError(message)
