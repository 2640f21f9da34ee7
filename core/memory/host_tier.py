"""KV pages in host memory: what the device forgets is kept a while longer and comes back on a hit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from hashlib import blake2b

from dovetail.core.interfaces import PageOp, PageOpKind
from dovetail.core.memory.page_list import expect


def page_key(parent: bytes, tokens: bytes) -> bytes:
    """Names a page's contents: its token ids as bytes, behind the key of the page before (a first page: the salt)."""
    return blake2b(parent + tokens, digest_size=16).digest()


class HostTier:
    """One group's host pages 1 .. total, each with the contents of one key. Least recently used goes first.

    A key names contents: tokens, everything before them, and the salt. So a page found here is never out of date, and a
    page that was loaded stays: evicted again, it need not be stored again. Operations gather in `ops` and must run in
    that order, whatever becomes of the sequence that they were made for.
    """

    __slots__ = ("_free", "_pages", "_pinned", "group", "loads", "ops", "stores", "total")

    def __init__(self, group: int, total: int) -> None:
        self.group, self.total = group, total
        self.ops: list[PageOp] = []
        """Not taken yet."""
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
        """These are about to be loaded: until the next `pin`, no store takes their pages."""
        self._pinned = frozenset(keys)

    def store(self, key: Hashable, page: int) -> None:
        """A device page goes. Its contents stay here, unless every page here is about to be loaded."""
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
        """Bring the contents of a key that is here into a device page."""
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
