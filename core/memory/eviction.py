"""Which cached page goes first when pages run out. A policy is a value, not a component: a class with these methods."""

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
    """Orders one group's evictable pages: those cached and owned by nobody. Built without arguments, one a group.

    Subclassing is optional and brings the default of on_publish. Policies must be deterministic, and each method cheap:
    it runs between two steps. Without a page nothing behind it can be found, so a policy that lets the end of a prefix
    go before its start wastes least; the order of on_release is such an order.
    """

    def on_publish(self, page: int, depth: int, parent: int) -> None:
        """An owned page gets contents that others may find: the page number `depth` of its prefix, counted from 0,
        behind the page `parent` (0 = none). What was known of this page is no longer true."""

    def on_release(self, page: int) -> None:
        """The page becomes evictable. Of a sequence the last page comes first."""
        ...

    def on_hit(self, page: int) -> None:
        """A sequence found the page, evictable or owned by others too; or it goes together with one before it. Either
        way it is not evictable now."""
        ...

    def victim(self) -> int:
        """Choose an evictable page and forget it. Only called when there is one."""
        ...


class LRU(EvictionPolicy):
    """Least recently owned first. O(1) a call."""

    def __init__(self) -> None:
        self._evictable: OrderedDict[int, None] = OrderedDict()

    def on_release(self, page: int) -> None:
        self._evictable[page] = None

    def on_hit(self, page: int) -> None:
        self._evictable.pop(page, None)

    def victim(self) -> int:
        return self._evictable.popitem(last=False)[0]


class Ranked(EvictionPolicy):
    """Lowest rank first, equals in order of release. O(log pages) a call, amortised.

    A page never ranks below what was released behind it, so of a prefix the end goes first whatever the ranks say.
    """

    def __init__(self) -> None:
        self._published = 0
        self._birth: dict[int, int] = {}
        """Page -> number of its last publish."""
        self._parent: dict[int, tuple[int, int]] = {}
        """Page -> the page before it, and that one's birth then: its id may serve another prefix by now."""
        self._floor: dict[int, float] = {}
        """Page -> highest rank released behind it."""
        self._released = 0
        self._heap: list[tuple[float, int, int]] = []
        """(rank, number of the release, page); those not in `_entry` are dead and skipped."""
        self._entry: dict[int, tuple[float, int, int]] = {}
        """Evictable page -> its live heap entry."""

    def rank(self, page: int) -> float:
        """Asked when the page becomes evictable; its rank stays until it is found again."""
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
    """Longest published first, however often it was used since."""

    def rank(self, page: int) -> float:
        return self._birth[page]


class LFU(Ranked):
    """Least often found first. Counts never age: what was popular once stays long."""

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
"""Pages before a page at which attending to them costs as much as its linear layers: 26 000 tokens for a model of 8B
parameters and pages of 16 tokens (436 MFLOP against 16 kFLOP a token before it, per layer)."""


class CostAware(LFU):
    """Cheapest to recompute first: GreedyDual (Cao and Irani 1997), with use counts as in GDSF (Cherkasova 1998).

    A page ranks by its uses times the cost of recomputing it, which grows with its depth, above a level: the rank of
    the last victim. So what is not found any more sinks in comparison and goes at last.
    """

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
    """The policy's class: a built-in name, or "package.module:Class".

    ConfigError when there is none or it lacks a method, PluginError when its own code fails.
    """
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
    except Exception as error:  # somebody's module may raise anything; it is reported, never swallowed
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
