"""Eviction policies for cached pages. A policy is not a component but a class, chosen by a config value."""

from __future__ import annotations

import heapq
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from typing import Protocol

from dovetail.core.errors import ConfigError, PluginError


class EvictionPolicy(Protocol):
    """Order of one group's evictable pages: those that are cached and have no owner. Each group has its own instance,
    constructed without arguments. Subclassing is optional and provides the default on_publish. Policies must be
    deterministic, and methods must be cheap, since they run between steps. If a page is evicted, the pages after it in
    its prefix cannot be found, so evict the end of a prefix before its start. Calls of on_release come in that
    order."""

    def on_publish(self, page: int, depth: int, parent: int) -> None:
        """An owned page gets new findable contents; discard its old state. `depth`: index in its prefix, from 0.
        `parent`: the page before it in the prefix (0 = none)."""

    def on_release(self, page: int) -> None:
        """The page becomes evictable. A sequence releases its last page first."""
        ...

    def on_hit(self, page: int) -> None:
        """The page is no longer evictable. Either a sequence found it, which may happen while others own it, or it is
        evicted together with a page before it in the prefix."""
        ...

    def victim(self) -> int:
        """Choose and remove an evictable page. Only called if there is one."""
        ...


class LRU(EvictionPolicy):
    """Evict the least recently owned page first. O(1) per call."""

    def __init__(self) -> None:
        self._evictable: OrderedDict[int, None] = OrderedDict()

    def on_release(self, page: int) -> None:
        self._evictable[page] = None

    def on_hit(self, page: int) -> None:
        self._evictable.pop(page, None)

    def victim(self) -> int:
        return self._evictable.popitem(last=False)[0]


class Ranked(EvictionPolicy):
    """Evict the page of lowest rank first, and equal ranks in order of release. O(log pages) per call, amortised. A
    page never ranks below pages after it that were released, so the end of a prefix is evicted before its start."""

    def __init__(self) -> None:
        self._published = 0
        self._birth: dict[int, int] = {}
        """Page -> sequence number of its last publish."""
        self._parent: dict[int, tuple[int, int]] = {}
        """Page -> (page before it, that page's birth at the time, since its id may have been reused)."""
        self._floor: dict[int, float] = {}
        """Page -> highest rank of released pages after it in its prefix."""
        self._released = 0
        self._heap: list[tuple[float, int, int]] = []
        """(rank, release number, page). Entries not in `_entry` are stale and skipped."""
        self._entry: dict[int, tuple[float, int, int]] = {}
        """Evictable page -> its valid heap entry."""

    def rank(self, page: int) -> float:
        """Return the page's rank. Called when it becomes evictable; the rank is fixed until the page is found again."""
        raise NotImplementedError

    def on_publish(self, page: int, depth: int, parent: int) -> None:
        self._published += 1
        self._birth[page] = self._published
        self._parent[page] = parent, self._birth.get(parent, 0)
        self._floor.pop(page, None)

    def on_release(self, page: int) -> None:
        rank = max(self.rank(page), self._floor.get(page, -math.inf))
        parent, birth = self._parent[page]
        if parent and self._birth[parent] == birth:
            self._floor[parent] = max(rank, self._floor.get(parent, -math.inf))
        self._released += 1
        entry = self._entry[page] = rank, self._released, page
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entry) + 64:
            self._heap = list(self._entry.values())
            heapq.heapify(self._heap)

    def on_hit(self, page: int) -> None:
        self._entry.pop(page, None)

    def victim(self) -> int:
        while True:
            entry = heapq.heappop(self._heap)
            page = entry[2]
            if self._entry.get(page) == entry:
                del self._entry[page]
                return page


class FIFO(Ranked):
    """Evict the page that was published first, regardless of later use."""

    def rank(self, page: int) -> float:
        return self._birth[page]


class LFU(Ranked):
    """Evict the page that was found least often. Counts do not decay, so once-popular pages stay long."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[int, int] = {}

    def on_publish(self, page: int, depth: int, parent: int) -> None:
        super().on_publish(page, depth, parent)
        self._uses[page] = 1

    def on_hit(self, page: int) -> None:
        super().on_hit(page)
        self._uses[page] += 1

    def rank(self, page: int) -> float:
        return self._uses[page]


ATTENTION_PAGES = 1600
"""Depth in pages at which attention to preceding tokens costs as much as a page's linear layers. It is 26 000 tokens
for an 8B model with pages of 16 tokens (436 MFLOP against 16 kFLOP per preceding token, per layer)."""


class CostAware(LFU):
    """Evict the page that is cheapest to recompute: GreedyDual (Cao and Irani 1997), with use counts as in GDSF
    (Cherkasova 1998). The rank is a base level plus uses times recompute cost, which grows with depth. The level is the
    rank of the last victim, so pages that are no longer found are eventually evicted."""

    def __init__(self) -> None:
        super().__init__()
        self._level = 0.0
        self._cost: dict[int, float] = {}

    def on_publish(self, page: int, depth: int, parent: int) -> None:
        super().on_publish(page, depth, parent)
        self._cost[page] = 1 + depth / ATTENTION_PAGES

    def rank(self, page: int) -> float:
        return self._level + self._uses[page] * self._cost[page]

    def victim(self) -> int:
        while self._entry.get(self._heap[0][2]) != self._heap[0]:
            heapq.heappop(self._heap)
        self._level = self._heap[0][0]
        return super().victim()


BUILT_IN: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRU, "fifo": FIFO, "lfu": LFU, "cost": CostAware}
METHODS = {
    "on_publish": ("page", "depth", "parent"),
    "on_release": ("page",),
    "on_hit": ("page",),
    "victim": (),
}


def load_policy(name: str) -> Callable[[], EvictionPolicy]:
    """Return the policy's class for a built-in name or "package.module:Class". Raise ConfigError if it does not exist
    or lacks a method, PluginError if its own code fails."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, _, attribute = name.partition(":")
    options = f"eviction is one of {', '.join(BUILT_IN)}, or package.module:Class"
    if not attribute:
        raise ConfigError(f"eviction={name!r}: {options}")
    package = module.partition(".")[0]
    try:
        policy = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"eviction={name!r}: {error}; {options}") from error
    except Exception as error:  # a third-party module may raise anything; it is reported, never swallowed
        raise PluginError(package, f"eviction={name!r} does not load: {type(error).__name__}: {error}") from error
    if lacks := [method for method in METHODS if not callable(getattr(policy, method, None))]:
        raise ConfigError(f"eviction={name!r} lacks {', '.join(lacks)}: see dovetail.EvictionPolicy")
    try:
        made = policy()
    except Exception as error:
        raise PluginError(
            package, f"eviction={name!r}: {attribute}() failed: {type(error).__name__}: {error}"
        ) from error
    for method, parameters in METHODS.items():
        try:
            inspect.signature(getattr(made, method)).bind(*parameters)
        except TypeError as error:
            called = f"{method}({', '.join(parameters)})"
            raise ConfigError(f"eviction={name!r} cannot be called as {called}: {error}") from error
    return policy
