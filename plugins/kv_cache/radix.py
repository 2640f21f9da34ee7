"""Prefix reuse by a radix tree of token runs over pages: RadixAttention (SGLang, Zheng et al. 2023).

A node has a run of tokens and the pages whose last token is in it. Runs may branch at any token. A page that begins in
one node and ends in another belongs to the second, so two prompts that diverge inside a page have one page each.
Leaves end at a page boundary. A hit is exact to the token: the page it ends in is shared until reserve copies it.

Runs are compared as bytes, node by node; where two runs differ, a binary search finds the token. A lookup costs
O(prompt length), independent of the cache size. Host memory: 4 bytes per cached token.

The tree covers the pages on the device. With host pages, each of them has a key, too: the hash of its tokens and its
parent's key. Past the end of the tree, whole pages are looked up on the host by key; loaded pages join the tree.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dovetail.core.interfaces import Hit, KVGroup, KVSequence, PageEntry, Reservation
from dovetail.core.memory.cached_pages import CachedPages, CachedTables
from dovetail.core.memory.eviction import EvictionPolicy
from dovetail.core.memory.host_tier import HostTier, page_key
from dovetail.core.memory.page_list import expect
from dovetail.core.memory.page_tables import SequencePages
from dovetail.plugins.kv_cache.config import RadixConfig

WIDTH = array("i").itemsize
"""Bytes of a token id."""
WAITING = 1024
"""Most waiting sequences whose token bytes are kept between peeks. The oldest are dropped and rebuilt when needed."""


class Node:
    """Tokens [start, end), which follow those of its parents. Written by RadixPages only."""

    __slots__ = ("children", "key", "pages", "parent", "run", "start")

    def __init__(self, parent: Node | None, key: bytes, start: int) -> None:
        self.parent = parent
        self.key = key
        """Key among the parent's children: the first token; the salt for a root."""
        self.start = start
        self.run = bytearray()
        self.pages: list[int] = []
        """Pages from number start // page_tokens on. Page number i of a prefix begins at token i * page_tokens."""
        self.children: dict[bytes, Node] = {}

    @property
    def end(self) -> int:
        return self.start + len(self.run) // WIDTH


class RadixPages(CachedPages):
    """One group's pages and the tree that finds them."""

    __slots__ = ("keys", "node_of", "number_of", "roots")

    def __init__(self, group: KVGroup, total: int, policy: EvictionPolicy, host: HostTier) -> None:
        super().__init__(group, total, policy, host)
        self.roots: dict[bytes, Node] = {}
        """Roots by salt."""
        self.node_of: list[Node | None] = [None] * (total + 1)
        self.number_of = [0] * (total + 1)
        """Number of a published page in its prefix."""
        self.keys = [b""] * (total + 1 if host.total else 0)
        """Host key of each published page; empty without host pages."""

    def find(self, salt: bytes, data: bytearray, limit: int) -> tuple[int, list[int]]:
        """Return (tokens of the longest cached prefix, at most limit; its pages, 0 for a page on the host)."""
        at, pages = self._find_on_device(salt, data, limit)
        if not len(self.host):
            return at, pages
        whole = at // self.page_tokens
        loads = self._find_on_host(salt, data, pages[:whole], limit // self.page_tokens)
        if loads:
            kept = sum(self.refs[page] == 0 for page in pages[:whole])
            loads = loads[: max(self.available - kept, 0)]
        if not loads:
            return at, pages
        return (whole + len(loads)) * self.page_tokens, pages[:whole] + [0] * len(loads)

    def pin(self, salt: bytes, data: bytearray, pages: list[int]) -> None:
        """Add an owner to found pages. Pages on the host are loaded into new device pages, which join the tree."""
        first = pages.index(0) if 0 in pages else len(pages)
        for page in pages[:first]:
            self.hit(page)
        if first == len(pages):
            return
        keys = self._find_on_host(salt, data, pages[:first], len(pages))
        self.host.pin(keys)
        for number, key in enumerate(keys, first):
            pages[number] = self.take()
            self.host.load(key, pages[number])
        self.publish(salt, pages, first, data, len(pages))

    def _find_on_host(self, salt: bytes, data: bytearray, pages: list[int], limit: int) -> list[bytes]:
        """Return the keys of host pages that continue `pages`, up to page `limit`."""
        found: list[bytes] = []
        key = self.keys[pages[-1]] if pages else page_key(salt, b"")
        for number in range(len(pages), limit):
            key = self._key(key, data, number)
            if key not in self.host:
                break
            found.append(key)
        return found

    def _key(self, parent: bytes, data: bytearray, number: int) -> bytes:
        size = self.page_tokens * WIDTH
        return page_key(parent, bytes(data[number * size : (number + 1) * size]))

    def _find_on_device(self, salt: bytes, data: bytearray, limit: int) -> tuple[int, list[int]]:
        root = self.roots.get(salt)
        if root is None:
            return 0, []
        pages: list[int] = []
        node, at = self._descend(root, 0, data, limit, pages)
        if at % self.page_tokens:
            # The page ends in this node, or else in any descendant: these branch later within the same page.
            while at // self.page_tokens - node.start // self.page_tokens >= len(node.pages):
                node = next(iter(node.children.values()))
            pages.append(node.pages[at // self.page_tokens - node.start // self.page_tokens])
        return at, pages

    def own(self, table: list[int], known: int) -> int:
        """Return the number of leading pages of a table that are in the tree, given that `known` were: 0 if the last of
        them was withdrawn together with a page before it."""
        return known if known and self._published[table[known - 1]] else 0

    def follow(
        self, salt: bytes, table: list[int], known: int, data: bytearray, full: int
    ) -> tuple[Node, int, list[int]]:
        """Follow data from page `known`, up to which the table's pages are in the tree, to page `full`. Return the last
        node and token that agree, and the cached pages from number `known` on."""
        node = self.node_of[table[known - 1]] if known else self.roots.get(salt)
        if node is None:
            node = Node(None, salt, 0)
        pages: list[int] = []
        node, at = self._descend(node, known * self.page_tokens, data, full * self.page_tokens, pages)
        return node, at, pages

    def publish(self, salt: bytes, table: list[int], known: int, data: bytearray, full: int) -> int:
        """Publish the pages [known, full) of a table, up to the first whose contents another page already holds. Return
        the number of leading pages of the table that are in the tree."""
        node, at, pages = self.follow(salt, table, known, data, full)
        for page in pages:
            if page != table[known]:
                return known
            known += 1
        end = next((i for i in range(known, full) if self._published[table[i]]), full)
        if known == end:
            return known
        if at < node.end:
            node = self._split(node, at)
        if node.parent is None:
            self.roots[salt] = node
        if node.children or node.parent is None:
            parent, key = node, bytes(data[at * WIDTH : at * WIDTH + WIDTH])
            parent.children[key] = node = Node(parent, key, at)
        node.run += data[at * WIDTH : end * self.page_tokens * WIDTH]
        node.pages += table[known:end]
        for number in range(known, end):
            page = table[number]
            self.node_of[page], self.number_of[page] = node, number
            if self.keys:
                self.keys[page] = self._key(
                    self.keys[table[number - 1]] if number else page_key(salt, b""), data, number
                )
            self._offer(page, number, table[number - 1] if number else 0)
        return end

    def _descend(self, node: Node, at: int, data: bytearray, limit: int, pages: list[int]) -> tuple[Node, int]:
        """Follow data from token `at` of a node. Return the node and token where it ends or differs; append the pages
        that end on the path."""
        size = self.page_tokens
        while True:
            start, end = node.start, min(node.end, limit)
            agreed = at + _common(
                node.run[(at - start) * WIDTH : (end - start) * WIDTH], data[at * WIDTH : end * WIDTH]
            )
            pages += node.pages[at // size - start // size : agreed // size - start // size]
            at = agreed
            if at < end or at == limit:
                return node, at
            child = node.children.get(bytes(data[at * WIDTH : at * WIDTH + WIDTH]))
            if child is None:
                return node, at
            node = child

    def _split(self, node: Node, at: int) -> Node:
        """Insert and return a node for the tokens before `at`; the given node keeps the rest."""
        parent = node.parent
        assert parent is not None and node.start < at < node.end
        upper = parent.children[node.key] = Node(parent, node.key, node.start)
        tokens = (at - node.start) * WIDTH
        pages = at // self.page_tokens - node.start // self.page_tokens
        upper.run, upper.pages = node.run[:tokens], node.pages[:pages]
        del node.run[:tokens], node.pages[:pages]
        node.parent, node.key, node.start = upper, bytes(node.run[:WIDTH]), at
        upper.children[node.key] = node
        for page in upper.pages:
            self.node_of[page] = upper
        return upper

    def _withdraw(self, page: int) -> None:
        """Withdraw a page and all pages that continue it, which would be unreachable."""
        node, at, gone = self._from(page)
        node.children = {}
        self._shorten(node, at)
        for each in gone:
            self.node_of[each] = None
            if each != page and not self.refs[each]:
                self.policy.on_hit(each)
            self._unpublish(each)

    def _leaving(self, page: int) -> Iterable[tuple[Hashable, int]]:
        return [(self.keys[each], each) for each in reversed(self._from(page)[2])]

    def _from(self, page: int) -> tuple[Node, int, list[int]]:
        """Return (node, the first token there that leaves with it, the page and its continuations, parents first)."""
        node = self.node_of[page]
        assert node is not None, f"page {page} is published and in no node"
        size = self.page_tokens
        at = max(self.number_of[page] * size, node.start)
        pages = node.pages[at // size - node.start // size :]
        below = list(node.children.values())
        while below:
            other = below.pop()
            pages += other.pages
            below += other.children.values()
        return node, at, pages

    def _shorten(self, node: Node, end: int) -> None:
        """Cut a node without children at token `end`, at a page boundary. Remove nodes that become empty."""
        while end <= node.start and node.parent is not None:
            del node.parent.children[node.key]
            node = node.parent
            if node.children:
                return
            end = node.end // self.page_tokens * self.page_tokens
        if node.parent is None:
            del self.roots[node.key]
            return
        del node.run[(end - node.start) * WIDTH :]
        del node.pages[end // self.page_tokens - node.start // self.page_tokens :]

    def _check_unowned(self, free: set[int], owned: set[int]) -> None:
        super()._check_unowned(free, owned)
        where, size = f"group {self.group}", self.page_tokens
        found: list[int] = []
        nodes = list(self.roots.values())
        while nodes:
            node = nodes.pop()
            numbers = range(node.start // size, node.end // size)
            at = f"{where}: node of tokens {node.start} to {node.end}"
            expect(len(node.pages) == len(numbers), f"{at} has {len(node.pages)} pages, not {len(numbers)}")
            expect(bool(node.children) or node.end % size == 0, f"{at} has no child and ends inside a page")
            for number, page in zip(numbers, node.pages, strict=True):
                known = self.node_of[page] is node and self.number_of[page] == number
                expect(known, f"{at}: page {page} is not known as its number {number}")
            for first, child in node.children.items():
                linked = child.parent is node and child.start == node.end and child.run[:WIDTH] == first == child.key
                expect(linked, f"{at} has a child of tokens {child.start} to {child.end} that does not follow it")
            found += node.pages
            nodes += node.children.values()
        published = [page for page in range(self.total + 1) if self._published[page]]
        expect(sorted(found) == published, f"{where}: {len(found)} pages in the tree, {len(published)} are published")


def _common(a: bytearray, b: bytearray) -> int:
    """Return the number of common leading tokens of two runs of equal length."""
    low, high = 0, len(a) // WIDTH
    if a == b:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if a[low * WIDTH : middle * WIDTH] == b[low * WIDTH : middle * WIDTH]:
            low = middle
        else:
            high = middle
    return low


@dataclass(slots=True)
class TreePages(SequencePages):
    data: bytearray = field(default_factory=bytearray)
    """Bytes of the sequence's leading token ids, as far as needed so far."""
    known: list[int] = field(default_factory=list)
    """Leading pages per group that are in the tree."""
    offered: int = 0
    """Number of tokens published."""
    duplicates: bool = False
    """Whether another page in the tree holds the contents of one of the sequence's pages."""


class RadixAllocator(CachedTables[RadixPages, TreePages]):
    """Hits are exact to the token (config.exact=False: whole pages) and limited by the group with the shortest hit.

    A sequence that publishes contents which another page already holds switches to that page in the next reserve that
    adds a page, or on release. So an owner of a cached page owns all pages before it, and unowned pages can be evicted
    from the ends of prefixes. For the same reason a sequence keeps pages that have left an attention window.
    """

    config: RadixConfig
    slides = False

    def __init__(self, config: RadixConfig, groups: Sequence[KVGroup], num_pages: Mapping[int, int]) -> None:
        super().__init__(config, groups, num_pages)
        self._stride = 1 if config.exact else math.lcm(*(group.page_tokens for group in self.groups))
        self._waiting: dict[int, tuple[list[int], bytearray]] = {}
        """Uid -> (token list, its bytes), for sequences that were peeked at and not acquired."""

    def peek(self, seq: KVSequence) -> int:
        state = self._states.get(seq.uid)
        return self._find(seq, state.data if state else self._waiting_data(seq))[0]

    def acquire(self, seq: KVSequence, *, reuse: bool = True) -> Hit:
        state = self._register(seq)
        if not reuse:
            return Hit()
        hit, found = self._find(seq, state.data)
        if not hit:
            return Hit()
        entries: list[PageEntry] = []
        for (pages, table), shared in zip(self._by_group(state), found, strict=True):
            table.extend(shared[: pages.count(hit)])
            pages.pin(seq.salt.encode(), state.data, table)
            entries += [(pages.group, index, page) for index, page in enumerate(table)]
        state.length = state.written = state.room = hit
        state.known = [hit // pages.page_tokens for pages in self._pages]
        self._note_offered(state, hit)
        return Hit(hit, tuple(entries), self._moves())

    def _offer_full(self, seq: KVSequence, state: TreePages, upto: int) -> None:
        self._note_offered(state, upto)
        self._offer(seq, state)

    def trim(self, seq: KVSequence, length: int) -> None:
        super().trim(seq, length)
        state = self._states[seq.uid]
        # Tokens past length may change.
        del state.data[length * WIDTH :]
        state.known = [min(n, length // pages.page_tokens) for n, pages in zip(state.known, self._pages, strict=True)]
        self._note_offered(state, min(state.offered, length))

    def fork(self, parent: KVSequence, child: KVSequence, upto: int) -> Hit:
        hit = super().fork(parent, child, upto)
        source, state = self._states[parent.uid], self._states[child.uid]
        if child.salt == parent.salt:
            state.known = [
                min(n, upto // pages.page_tokens) for n, pages in zip(source.known, self._pages, strict=True)
            ]
        self._note_offered(state, min(source.offered, upto))
        return hit

    def release(self, seq: KVSequence) -> None:
        self._waiting.pop(seq.uid, None)
        state = self._states.get(seq.uid)
        if state is not None and state.duplicates:
            self._adopt(seq, state)
        super().release(seq)

    def _cached_pages(self, group: KVGroup, total: int, policy: EvictionPolicy, host: HostTier) -> RadixPages:
        return RadixPages(group, total, policy, host)

    def _new_state(self, seq: KVSequence) -> TreePages:
        data = self._waiting_data(seq)
        del self._waiting[seq.uid]
        state = TreePages([[] for _ in self.groups], data=data, known=[0] * len(self.groups))
        self._note_offered(state, 0)
        return state

    def _grow(self, seq: KVSequence, upto: int, ahead: int) -> Reservation | None:
        made = super()._grow(seq, upto, ahead)
        state = self._states.get(seq.uid)
        if made is None or state is None or not state.duplicates:
            return made
        return Reservation(made.entries + self._adopt(seq, state), made.ops)

    def _shared_index(self, pages: RadixPages, table: list[int], written: int, upto: int) -> int | None:
        """Also copy a cached page before it is written to, while enough pages are available for the copy."""
        index = super()._shared_index(pages, table, written, upto)
        if index is not None or written % pages.page_tokens == 0:
            return index
        index = written // pages.page_tokens
        missing = max(pages.count(upto) - len(table), 0)
        return index if missing < pages.available and not pages.private(table[index]) else None

    def _find(self, seq: KVSequence, data: bytearray) -> tuple[int, list[list[int]]]:
        """Return (tokens of the longest cached prefix, per group at least its pages)."""
        limit = max(len(seq.tokens) - 1, 0) // self._stride * self._stride
        _extend(data, seq.tokens, limit)
        found = []
        for pages in self._pages:
            limit, shared = pages.find(seq.salt.encode(), data, limit)
            limit = limit // self._stride * self._stride
            found.append(shared)
        return limit, found

    def _offer(self, seq: KVSequence, state: TreePages) -> None:
        _extend(state.data, seq.tokens, state.offered)
        state.duplicates = False
        for position, (pages, table) in enumerate(self._by_group(state)):
            known, full = pages.own(table, state.known[position]), state.offered // pages.page_tokens
            known = state.known[position] = pages.publish(seq.salt.encode(), table, known, state.data, full)
            state.duplicates |= known < full

    def _adopt(self, seq: KVSequence, state: TreePages) -> tuple[PageEntry, ...]:
        """Replace the sequence's duplicate pages by the cached ones, and publish those that follow."""
        entries: list[PageEntry] = []
        for position, (pages, table) in enumerate(self._by_group(state)):
            known, full = pages.own(table, state.known[position]), state.offered // pages.page_tokens
            _, _, cached = pages.follow(seq.salt.encode(), table, known, state.data, full)
            for number, page in enumerate(cached, known):
                own = table[number]
                if page != own:
                    pages.hit(page)
                    table[number] = page
                    pages.drop(own)
                    entries.append((pages.group, number, page))
            state.known[position] = known + len(cached)
        self._offer(seq, state)
        return tuple(entries)

    def _note_offered(self, state: TreePages, upto: int) -> None:
        state.offered = upto
        state.next_full = min((upto // pages.page_tokens + 1) * pages.page_tokens for pages in self._pages)

    def _waiting_data(self, seq: KVSequence) -> bytearray:
        """Return the bytes of the last peek while the sequence has the same token list, which only grows."""
        tokens, data = self._waiting.get(seq.uid, (None, bytearray()))
        if tokens is not seq.tokens:
            data = bytearray()
            self._waiting[seq.uid] = (seq.tokens, data)
            if len(self._waiting) > WAITING:
                del self._waiting[next(iter(self._waiting))]
        return data


def _extend(data: bytearray, tokens: list[int], upto: int) -> None:
    have = len(data) // WIDTH
    if have < upto:
        data += array("i", tokens[have:upto]).tobytes()
