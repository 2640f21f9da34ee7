"""Which cached page goes first when pages run out. A policy is a value, not a component: a class with these methods."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from typing import Protocol

from dovetail.core.errors import ConfigError


class EvictionPolicy(Protocol):
    """Orders one group's evictable pages: those cached and owned by nobody. Built without arguments, one a group.

    Subclassing is optional and brings the default of on_publish. Policies must be deterministic, and each method cheap:
    it runs between two steps.
    """

    def on_publish(self, page: int, depth: int) -> None:
        """An owned page gets contents that others may find: the page number `depth` of its prefix, counted from 0."""

    def on_release(self, page: int) -> None:
        """The page becomes evictable. Of a sequence the last page comes first."""
        ...

    def on_hit(self, page: int) -> None:
        """An evictable page is owned again."""
        ...

    def victim(self) -> int:
        """Choose an evictable page and forget it. Only called when there is one."""
        ...


class LRU(EvictionPolicy):
    """Least recently owned first."""

    def __init__(self) -> None:
        self._evictable: OrderedDict[int, None] = OrderedDict()

    def on_release(self, page: int) -> None:
        self._evictable[page] = None

    def on_hit(self, page: int) -> None:
        del self._evictable[page]

    def victim(self) -> int:
        return self._evictable.popitem(last=False)[0]


class FIFO(EvictionPolicy):
    """Longest published first, however often it was used since. O(log pages) a call."""

    def __init__(self) -> None:
        self._published = 0
        self._birth: dict[int, int] = {}
        self._evictable: set[int] = set()
        self._heap: list[tuple[int, int]] = []
        """(birth, page); entries of owned pages are skipped when they come up."""
        self._queued: dict[int, int] = {}
        """Page -> birth of its live heap entry."""

    def on_publish(self, page: int, depth: int) -> None:
        self._published += 1
        self._birth[page] = self._published

    def on_release(self, page: int) -> None:
        self._evictable.add(page)
        birth = self._birth[page]
        if self._queued.get(page) != birth:
            self._queued[page] = birth
            heapq.heappush(self._heap, (birth, page))

    def on_hit(self, page: int) -> None:
        self._evictable.remove(page)

    def victim(self) -> int:
        while True:
            birth, page = heapq.heappop(self._heap)
            if self._queued.get(page) != birth:
                continue
            del self._queued[page]
            if page in self._evictable:
                self._evictable.remove(page)
                return page


BUILT_IN: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRU, "fifo": FIFO}


def load_policy(name: str) -> Callable[[], EvictionPolicy]:
    """The policy's class: a built-in name, or "package.module:Class". ConfigError when there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, _, attribute = name.partition(":")
    options = f"eviction is one of {', '.join(BUILT_IN)}, or package.module:Class"
    if not attribute:
        raise ConfigError(f"eviction={name!r}: {options}")
    try:
        policy = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"eviction={name!r}: {error}; {options}") from error
    missing = [method for method in ("on_publish", "on_release", "on_hit", "victim") if not hasattr(policy, method)]
    if missing or not callable(policy):
        lacks = ", ".join(missing) or "a constructor"
        raise ConfigError(f"eviction={name!r} lacks {lacks}: see {__name__}.EvictionPolicy")
    return policy
