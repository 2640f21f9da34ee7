"""Paged allocation with automatic prefix caching by chained page hashes, as in vLLM (Kwon et al. 2023).

A published full page gets a key: the hash of its parent's key and its token ids. The first parent is the salt. Equal
keys mean equal prefixes (128 bits of BLAKE2b). An unowned page can be found until it is evicted.

When two sequences publish the same prefix, the first page keeps the key and the second one stays private: switching the
second sequence would change a page table outside reserve, for pages that are usually released soon.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from dovetail.core.interfaces import Hit, KVGroup, KVSequence, PageEntry
from dovetail.core.memory.cached_pages import CachedPages, CachedTables
from dovetail.core.memory.eviction import EvictionPolicy
from dovetail.core.memory.host_tier import HostTier, page_key
from dovetail.core.memory.page_list import expect
from dovetail.core.memory.page_tables import SequencePages
from dovetail.plugins.kv_cache.config import PrefixHashConfig

WAITING_CHAINS = 8192
"""Most waiting sequences whose keys are kept between peeks. The oldest are dropped and hashed again when needed."""


class KeyChain:
    """Keys of a sequence's full pages of one size. Each is computed once, when first needed."""

    __slots__ = ("keys", "page_tokens", "root")

    def __init__(self, salt: str, page_tokens: int) -> None:
        self.root = blake2b(salt.encode(), digest_size=16).digest()
        self.page_tokens = page_tokens
        self.keys: list[bytes] = []

    def extend(self, tokens: list[int], pages: int) -> None:
        """Compute the keys of the first `pages` pages."""
        size, keys = self.page_tokens, self.keys
        parent = keys[-1] if keys else self.root
        for start in range(len(keys) * size, pages * size, size):
            parent = page_key(parent, array("i", tokens[start : start + size]).tobytes())
            keys.append(parent)


class KeyedPages(CachedPages):
    """Published pages, found by key."""

    __slots__ = ("index", "keys")

    def __init__(self, group: KVGroup, total: int, policy: EvictionPolicy, host: HostTier) -> None:
        super().__init__(group, total, policy, host)
        self.index: dict[bytes, int] = {}
        """Key -> page, owned or evictable."""
        self.keys: list[bytes | None] = [None] * (total + 1)
        """The inverse of index."""

    def publish(self, page: int, key: bytes, depth: int, parent: int) -> None:
        if key in self.index or self.keys[page] is not None:
            return
        self.index[key] = page
        self.keys[page] = key
        self._offer(page, depth, parent)

    def find(self, chain: KeyChain, tokens: list[int], limit: int) -> int:
        """Pages of the longest usable prefix, at most limit: all that the next token attends to are cached."""
        index, host, keys = self.index, self.host, chain.keys
        if self.window:
            chain.extend(tokens, limit)
            depth = limit - 1
            while depth >= self.behind(limit * self.page_tokens):
                if keys[depth] not in index and keys[depth] not in host:
                    limit = depth
                depth -= 1
            return limit
        for depth in range(limit):
            if depth == len(keys):
                chain.extend(tokens, depth + 1)
            if keys[depth] not in index and keys[depth] not in host:
                return depth
        return limit

    def loadable(self, keys: list[bytes], pages: int) -> int:
        """Reduce the number of found pages so that those on the host fit into the device's available pages."""
        if not len(self.host):
            return pages
        first = self.behind(pages * self.page_tokens)
        loads = [depth for depth in range(first, pages) if keys[depth] not in self.index]
        if not loads:
            return pages
        kept = sum(self.refs[page] == 0 for key in keys[first:pages] if (page := self.index.get(key)))
        room = max(self.available - kept, 0)
        return loads[room] if len(loads) > room else pages

    def pin(self, keys: list[bytes], first: int) -> list[int]:
        """Return the pages of keys[first:], each with one more owner. Pages on the host are loaded."""
        self.host.pin(keys[first:])
        pages = [self.index.get(key, 0) for key in keys[first:]]
        for page in pages:
            if page:
                self.hit(page)
        for number, page in enumerate(pages):
            if not page:
                page = pages[number] = self.take()
                depth = first + number
                self.host.load(keys[depth], page)
                parent = self.index.get(keys[depth - 1], 0) if depth else 0
                self.publish(page, keys[depth], depth, parent)
        return pages

    def _leaving(self, page: int) -> Iterable[tuple[Hashable, int]]:
        return ((self.keys[page], page),)

    def _withdraw(self, page: int) -> None:
        key = self.keys[page]
        assert key is not None, f"page {page} is published without a key"
        del self.index[key]
        self.keys[page] = None
        self._unpublish(page)

    def _check_unowned(self, free: set[int], owned: set[int]) -> None:
        super()._check_unowned(free, owned)
        found = {key: page for page, key in enumerate(self.keys) if key is not None}
        where = f"group {self.group}"
        expect(found == self.index, f"{where}: {len(self.index)} keys lead to pages, {len(found)} pages have one")
        silent = [page for page in found.values() if not self.published(page)]
        expect(not silent, f"{where}: pages {silent[:8]} have a key and are not published")


@dataclass(slots=True)
class HashedPages(SequencePages):
    chains: list[KeyChain] = field(default_factory=list)
    """One per group; groups of equal page size share one."""
    published: list[int] = field(default_factory=list)
    """Leading pages per group that were published or came from the cache."""


class PrefixHashAllocator(CachedTables[KeyedPages, HashedPages]):
    """Hits are multiples of every group's page size. In a group with a window they need only the window's pages."""

    config: PrefixHashConfig

    def __init__(self, config: PrefixHashConfig, groups: Sequence[KVGroup], num_pages: Mapping[int, int]) -> None:
        super().__init__(config, groups, num_pages)
        self._sizes = [group.page_tokens for group in self.groups]
        self._stride = math.lcm(*self._sizes)
        # Groups without a window first: their hits bound the search in the others.
        self._search = sorted(range(len(self.groups)), key=lambda number: self.groups[number].window > 0)
        self._waiting: dict[int, tuple[list[int], list[KeyChain]]] = {}
        """Uid -> (hashed token list, its keys), for sequences that were peeked at and not acquired."""

    def peek(self, seq: KVSequence) -> int:
        state = self._states.get(seq.uid)
        return self._find(seq, state.chains if state else self._waiting_chains(seq))

    def acquire(self, seq: KVSequence, *, reuse: bool = True) -> Hit:
        state = self._register(seq)
        if not reuse:
            return Hit()
        hit = self._find(seq, state.chains)
        if not hit:
            return Hit()
        entries: list[PageEntry] = []
        state.behind = [pages.behind(hit) for pages in self._pages]
        for (pages, table), chain, behind in zip(self._by_group(state), state.chains, state.behind, strict=True):
            table.extend([0] * behind)
            for page in pages.pin(chain.keys[: hit // pages.page_tokens], behind):
                entries.append((pages.group, len(table), page))
                table.append(page)
        state.length = state.written = state.room = hit
        self._note_published(state, hit)
        return Hit(hit, tuple(entries), self._moves())

    def _offer_full(self, seq: KVSequence, state: HashedPages, upto: int) -> None:
        for position, (pages, chain) in enumerate(zip(self._pages, state.chains, strict=True)):
            full, table, keys = upto // pages.page_tokens, state.tables[position], chain.keys
            chain.extend(seq.tokens, full)
            for depth in range(max(state.published[position], state.behind[position]), full):
                parent = pages.index.get(keys[depth - 1], 0) if depth else 0
                pages.publish(table[depth], keys[depth], depth, parent)
        self._note_published(state, upto)

    def trim(self, seq: KVSequence, length: int) -> None:
        super().trim(seq, length)
        state = self._states[seq.uid]
        for pages, chain in zip(self._pages, state.chains, strict=True):
            # Tokens past length may change.
            del chain.keys[length // pages.page_tokens :]
        if length < state.next_full:
            self._note_published(state, length)

    def fork(self, parent: KVSequence, child: KVSequence, upto: int) -> Hit:
        hit = super().fork(parent, child, upto)
        source, state = self._states[parent.uid], self._states[child.uid]
        if child.salt == parent.salt:
            for pages, chain, known in zip(self._pages, state.chains, source.chains, strict=True):
                chain.keys[:] = known.keys[: upto // pages.page_tokens]
        self._note_published(state, min(upto, source.next_full - 1))
        return hit

    def release(self, seq: KVSequence) -> None:
        self._waiting.pop(seq.uid, None)
        super().release(seq)

    def _cached_pages(self, group: KVGroup, total: int, policy: EvictionPolicy, host: HostTier) -> KeyedPages:
        return KeyedPages(group, total, policy, host)

    def _new_state(self, seq: KVSequence) -> HashedPages:
        chains = self._waiting_chains(seq)
        self._waiting.pop(seq.uid, None)
        state = HashedPages([[] for _ in self.groups], chains=chains)
        self._note_published(state, 0)
        return state

    def _waiting_chains(self, seq: KVSequence) -> list[KeyChain]:
        """Return the chains of the last peek while the sequence has the same token list, which only grows."""
        tokens, chains = self._waiting.get(seq.uid, (None, []))
        if tokens is not seq.tokens:
            by_size = {size: KeyChain(seq.salt, size) for size in {group.page_tokens for group in self.groups}}
            chains = [by_size[group.page_tokens] for group in self.groups]
            self._waiting[seq.uid] = (seq.tokens, chains)
            if len(self._waiting) > WAITING_CHAINS:
                del self._waiting[next(iter(self._waiting))]
        return chains

    def _find(self, seq: KVSequence, chains: list[KeyChain]) -> int:
        hit = max(len(seq.tokens) - 1, 0) // self._stride * self._stride
        while True:
            longest = hit
            for number in self._search:
                pages = self._pages[number]
                chain = chains[number]
                found = pages.loadable(chain.keys, pages.find(chain, seq.tokens, hit // pages.page_tokens))
                hit = found * pages.page_tokens // self._stride * self._stride
            # A part of a found prefix is cached, too, except in groups with a window.
            if hit == longest or not pages.window:
                return hit

    def _note_published(self, state: HashedPages, upto: int) -> None:
        state.published = [upto // size for size in self._sizes]
        state.next_full = min([(upto // size + 1) * size for size in self._sizes])
