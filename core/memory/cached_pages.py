"""Pages that are kept for reuse on the device and then on the host. Base of allocators that reuse prefixes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from dovetail.core.errors import ConfigError, PluginError
from dovetail.core.interfaces import KVGroup, KVStats, PageOp
from dovetail.core.memory.eviction import EvictionPolicy, load_policy
from dovetail.core.memory.host_tier import HostTier
from dovetail.core.memory.page_list import PageList, expect
from dovetail.core.memory.page_tables import PageTables, State


class CachedPages(PageList):
    """Page list with a cache: each page is free, owned, or unowned and evictable. A subclass defines how published
    pages are looked up and removes them in `_withdraw`. Evicted contents are stored on the host under their key;
    `host.load` restores them."""

    __slots__ = ("_evictable", "_published", "evictions", "host", "policy")

    def __init__(self, group: KVGroup, total: int, policy: EvictionPolicy, host: HostTier) -> None:
        super().__init__(group, total)
        self.policy = policy
        self.host = host
        self.evictions = 0
        self._evictable = 0
        self._published = bytearray(total + 1)
        """1 for each page that can be found."""

    # For subclasses.

    def _offer(self, page: int, depth: int, parent: int) -> None:
        """Make an owned page findable. It has index `depth` in its prefix and follows the page `parent`."""
        self._published[page] = 1
        self.policy.on_publish(page, depth, parent)

    def _withdraw(self, page: int) -> None:
        """Remove a published page from the lookup. Call `_unpublish` for it and for all pages removed with it."""
        raise NotImplementedError

    def _leaving(self, page: int) -> Iterable[tuple[Hashable, int]]:
        """Return (key, page) of an evictable page about to be withdrawn and of the unowned pages removed with it, the
        least valuable first. Called only if there are host pages."""
        raise NotImplementedError

    def _unpublish(self, page: int) -> None:
        """Mark the page as not findable; free it if it has no owner."""
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
        # Inlined PageList.take, since this runs for every page that a decode row fills.
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def hit(self, page: int) -> None:
        """Add an owner to a published page that a lookup found."""
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
        """Drop every evictable page without counting evictions."""
        evictions = self.evictions
        while self._evictable:
            self._withdraw(self._victim())
        self.evictions = evictions
        self.host.reset()

    def _evict(self) -> None:
        page = self._victim()
        if self.host.total:
            for key, leaving in self._leaving(page):
                self.host.store(key, leaving)
        self._withdraw(page)

    def _victim(self) -> int:
        page = self.policy.victim()
        if self.refs[page] or not self._published[page]:
            policy = type(self.policy)
            package = policy.__module__.partition(".")[0]
            raise PluginError(package, f"{policy.__name__}.victim() chose page {page}, which is not evictable")
        return page

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


class CacheConfig(Protocol):
    """Config fields that CachedTables reads."""

    @property
    def eviction(self) -> str: ...
    @property
    def host_pages(self) -> int: ...
    @property
    def host_gib(self) -> float: ...


Pages = TypeVar("Pages", bound=CachedPages)


class CachedTables(PageTables[Pages, State]):
    """PageTables over CachedPages. Creates each group's eviction policy and host tier, and returns the tiers' ops. A
    subclass creates its pages in `_cached_pages` and returns `_moves()` as the ops of a Hit that loads."""

    config: CacheConfig

    def __init__(self, config: CacheConfig, groups: Sequence[KVGroup], num_pages: Mapping[int, int]) -> None:
        self._policy = load_policy(config.eviction)
        super().__init__(config, groups, num_pages)

    def _cached_pages(self, group: KVGroup, total: int, policy: EvictionPolicy, host: HostTier) -> Pages:
        raise NotImplementedError

    def _page_list(self, group: KVGroup, total: int) -> Pages:
        host = HostTier(group.id, self.host_pages(self.config, self.groups)[group.id])
        return self._cached_pages(group, total, self._policy(), host)

    @classmethod
    def host_pages(cls, config: Any, groups: Sequence[KVGroup]) -> dict[int, int]:
        pages = config.host_pages
        if config.host_gib:
            each = sum(group.bytes_per_page for group in groups)
            pages = int(config.host_gib * 2**30 / each)
            if not pages:
                raise ConfigError(f"kv_cache.host_gib={config.host_gib:g}: a page takes {each} bytes; 0 = no host tier")
        return {group.id: pages for group in groups}

    def _moves(self) -> tuple[PageOp, ...]:
        return tuple(op for pages in self._pages for op in pages.host.take_ops())

    def stats(self) -> KVStats:
        tiers = [pages.host for pages in self._pages]
        return replace(
            super().stats(),
            evictions=sum(pages.evictions for pages in self._pages),
            host_pages=sum(len(tier) for tier in tiers),
            loads=sum(tier.loads for tier in tiers),
            stores=sum(tier.stores for tier in tiers),
        )

    def check(self) -> None:
        super().check()
        for pages in self._pages:
            pages.host.check()

    def reset(self) -> None:
        for pages in self._pages:
            pages.reset()
