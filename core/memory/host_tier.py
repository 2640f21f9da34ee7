"""KV pages in host memory. They keep contents that were evicted from the device and are loaded back on a hit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from hashlib import blake2b

from dovetail.core.interfaces import PageOp, PageOpKind
from dovetail.core.memory.page_list import expect


def page_key(parent: bytes, tokens: bytes) -> bytes:
    """Key of a page's contents: hash of the preceding page's key (for a first page, the salt) and its token bytes."""
    return blake2b(parent + tokens, digest_size=16).digest()


class HostTier:
    """One group's host pages 1 .. total, each with the contents of one key, replaced in LRU order. A key identifies
    tokens, all tokens before them, and the salt. So a page is never stale, and it is kept after a load: if the device
    evicts it again, it need not be stored again. Operations accumulate in `ops` and must run in that order, even if the
    sequence that caused them is gone."""

    __slots__ = ("_free", "_pages", "_pinned", "group", "loads", "ops", "stores", "total")

    def __init__(self, group: int, total: int) -> None:
        self.group, self.total = group, total
        self.ops: list[PageOp] = []
        """Operations not yet returned by take_ops."""
        self.loads = self.stores = 0
        """Pages moved since start."""
        self._free = list(range(total, 0, -1))
        self._pages: OrderedDict[Hashable, int] = OrderedDict()
        self._pinned: frozenset[Hashable] = frozenset()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def pin(self, keys: Iterable[Hashable]) -> None:
        """Protect pages that are about to be loaded: until the next `pin`, no store replaces them."""
        self._pinned = frozenset(keys)

    def store(self, key: Hashable, page: int) -> None:
        """Keep the contents of a device page that is evicted. Does nothing if all host pages are pinned."""
        if key in self._pages:
            self._pages.move_to_end(key)
            return
        if not self._free:
            oldest = next((known for known in self._pages if known not in self._pinned), None)
            if oldest is None:
                return
            self._free.append(self._pages.pop(oldest))
        host = self._pages[key] = self._free.pop()
        self.stores += 1
        self.ops.append(PageOp(PageOpKind.STORE, self.group, page, host))

    def load(self, key: Hashable, page: int) -> None:
        """Load the contents of a stored key into a device page."""
        self._pages.move_to_end(key)
        self.loads += 1
        self.ops.append(PageOp(PageOpKind.LOAD, self.group, self._pages[key], page))

    def take_ops(self) -> tuple[PageOp, ...]:
        if not self.ops:
            return ()
        ops, self.ops = tuple(self.ops), []
        return ops

    def reset(self) -> None:
        self._free = list(range(self.total, 0, -1))
        self._pages.clear()

    def check(self) -> None:
        pages = sorted([*self._free, *self._pages.values()])
        where = f"group {self.group}"
        expect(
            pages == list(range(1, self.total + 1)),
            f"{where}: {len(self._free)} free + {len(self._pages)} used of {self.total} host pages",
        )
        expect(not self.ops, f"{where}: {len(self.ops)} host page operations were not handed out")
