"""A group's pages where some outlive their owners: what allocators that reuse prefixes share."""

from __future__ import annotations

from dovetail.core.errors import PluginError
from dovetail.core.interfaces import KVGroup
from dovetail.core.memory.eviction import EvictionPolicy
from dovetail.core.memory.page_list import PageList, expect


class CachedPages(PageList):
    """Each page is free, owned, or unowned and evictable. A subclass says how published pages are found, and forgets
    them when `_withdraw` says so."""

    __slots__ = ("_evictable", "_published", "evictions", "policy")

    def __init__(self, group: KVGroup, total: int, policy: EvictionPolicy) -> None:
        super().__init__(group, total)
        self.policy = policy
        self.evictions = 0
        self._evictable = 0
        self._published = bytearray(total + 1)
        """1 where a page can be found."""

    # For subclasses.

    def _offer(self, page: int, depth: int, parent: int) -> None:
        """An owned page can be found from now on: number `depth` of a prefix, behind the page `parent`."""
        self._published[page] = 1
        self.policy.on_publish(page, depth, parent)

    def _withdraw(self, page: int) -> None:
        """A published page's contents go: nobody may find it any more. `_unpublish` it, and others that go along."""
        raise NotImplementedError

    def _unpublish(self, page: int) -> None:
        """The page cannot be found any more; without an owner it is free."""
        self._published[page] = 0
        if not self.refs[page]:
            self._evictable -= 1
            self.evictions += 1
            self.free.append(page)

    # PageList.

    @property
    def cached(self) -> int:
        return self._evictable

    @property
    def available(self) -> int:
        return len(self.free) + self._evictable

    def published(self, page: int) -> bool:
        return bool(self._published[page])

    def private(self, page: int) -> bool:
        return self.refs[page] == 1 and not self._published[page]

    def take(self) -> int:
        if not self.free:
            self._evict()
        return super().take()

    def hit(self, page: int) -> None:
        """One more sequence owns a published page: it was found."""
        self.policy.on_hit(page)
        if not self.refs[page]:
            self._evictable -= 1
        self.refs[page] += 1

    def drop(self, page: int) -> None:
        self.refs[page] -= 1
        if self.refs[page]:
            return
        if self._published[page]:
            self._evictable += 1
            self.policy.on_release(page)
        else:
            self.free.append(page)

    def overwrite(self, page: int) -> None:
        if self._published[page]:
            self._withdraw(page)

    def reset(self) -> None:
        """Forget every evictable page. No eviction: nobody needed the room."""
        evictions = self.evictions
        while self._evictable:
            self._withdraw(self._victim())
        self.evictions = evictions

    def _evict(self) -> None:
        page = self._victim()
        self._save(page)
        self._withdraw(page)

    def _victim(self) -> int:
        page = self.policy.victim()
        if self.refs[page] or not self._published[page]:
            policy = type(self.policy)
            package = policy.__module__.partition(".")[0]
            raise PluginError(package, f"{policy.__name__}.victim() chose page {page}, which is not evictable")
        return page

    def _save(self, page: int) -> None:
        """A page is about to be evicted, its contents still there."""

    def _check_unowned(self, free: set[int], owned: set[int]) -> None:
        published = {page for page, flag in enumerate(self._published) if flag}
        cached = published - owned
        where = f"group {self.group}"
        expect(
            len(free) + len(owned) + len(cached) == self.total and len(cached) == self._evictable,
            f"{where}: {len(free)} free + {len(owned)} owned + {len(cached)} cached of {self.total} pages, "
            f"{self._evictable} counted as evictable",
        )
        expect(not free & published, f"{where}: free pages {sorted(free & published)[:8]} can be found")
