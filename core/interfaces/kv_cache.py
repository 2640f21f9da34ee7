"""The KV allocator seam: which pages hold which sequence's keys and values. Pages, never tensors.

Paging follows PagedAttention (Kwon et al. 2023); block-hash reuse follows vLLM, radix reuse SGLang (Zheng et al. 2023).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from dovetail.core.interfaces.plan import PageOp

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of per-token state in a page: K, V, a scale, or a plugin's own."""

    name: str
    shape: tuple[int, ...]
    """Per token, for instance (kv_heads, head_dim)."""
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        size = self.dtype.itemsize
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one page table."""

    id: int
    layers: tuple[int, ...]
    """Model layer indices."""
    planes: tuple[Plane, ...] = field(default=())
    kind: Literal["full", "window", "mla"] = "full"
    window: int = 0
    """Tokens a window group looks back, the current one included. Pages wholly behind it are given back."""
    page_tokens: int = 16

    @property
    def bytes_per_page(self) -> int:
        """Over all layers and planes."""
        return self.page_tokens * len(self.layers) * sum(p.bytes_per_token for p in self.planes)

    def pages_behind(self, position: int) -> int:
        """Leading pages of a table that no token at `position` or later looks back at; 0 without a window."""
        return max(position - self.window + 1, 0) // self.page_tokens if self.window else 0

    def tokens_held(self, tokens: int, ahead: int) -> int:
        """Token slots in the pages that a sequence of so many tokens holds at once at most, when plans write up to
        `ahead` tokens past what is published."""
        return min(tokens, self.window + ahead + self.page_tokens - 1) if self.window else tokens


class KVSequence(Protocol):
    """What an allocator reads of a sequence (dovetail.core.interfaces.Sequence has it)."""

    @property
    def uid(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def salt(self) -> str: ...
    @property
    def limit(self) -> int:
        """Tokens it is expected to have at most, for allocators that reserve ahead."""
        ...


PageEntry = tuple[int, int, int]
"""(group, index in the sequence's page table, page id)"""


@dataclass(frozen=True, slots=True)
class Hit:
    """A cached prefix, pinned for the sequence."""

    tokens: int = 0
    """Prefix tokens whose KV the sequence now owns a share of; less than len(seq.tokens). Need not fill the last page:
    reserve copies that one, as after fork."""
    entries: tuple[PageEntry, ...] = ()
    ops: tuple[PageOp, ...] = ()
    """LOADs that bring host or remote pages in before they are read, and STOREs of what gave way to them. They must
    run, in order of calls, even if the sequence is released before it runs: others may find these pages by then."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Page-table changes that make room; empty when nothing changed."""

    entries: tuple[PageEntry, ...] = ()
    ops: tuple[PageOp, ...] = ()
    """Must run, in order, before the plan's forward."""


@dataclass(frozen=True, slots=True)
class KVStats:
    """Of all groups together."""

    pages: int
    free: int
    """Never written or given back, nothing reusable in them."""
    cached: int
    """Owned by no sequence, kept for reuse, evictable."""
    owned: int
    """Owned by at least one sequence."""
    used_tokens: int
    """Token slots in owned pages that reserve was asked for; the rest of owned slots is waste."""
    owned_tokens: int
    """Token slots in owned pages."""
    evictions: int = 0
    """Cached pages forgotten to make room, since start. (What was found, the engine counts.)"""
    host_pages: int = 0
    """Pages with contents in host memory."""
    loads: int = 0
    """Pages brought back from host memory, since start."""
    stores: int = 0
    """Pages copied to host memory, since start."""

    @property
    def waste(self) -> float:
        """Share of owned token slots that nobody has asked for yet: rests of last pages, and what was taken ahead."""
        return 1 - self.used_tokens / self.owned_tokens if self.owned_tokens else 0.0


class KVAllocator(ABC):
    """Owns the pages 1 .. num_pages[g] of each group g. Page 0 is the core's own, for padding: never hand it out.

    A sequence is known from its first acquire, fork or reserve until release. Every call is atomic over all groups:
    it succeeds in all or changes nothing. Calls cost O(pages touched), never O(pages cached). publish, trim and fork's
    parent must be known (ValueError). seq.tokens only grows, except past what trim gave.

    In a window group a sequence owns no page that lies wholly behind the window of every token still to be fed:
    publish(upto) gives back the first group.pages_behind(upto - 1) pages of its table, and a hit of n tokens has
    entries only from group.pages_behind(n) on. Plans in flight may still read them: whoever gets them writes in a later
    plan. An allocator that cannot do without these pages may treat a window group like any other; pages_needed says so.
    """

    def __init__(self, config: object, groups: Sequence[KVGroup], num_pages: Mapping[int, int]) -> None:
        self.config, self.groups, self.num_pages = config, tuple(groups), dict(num_pages)

    @abstractmethod
    def peek(self, seq: KVSequence) -> int:
        """Prefix tokens that acquire would find now. Pure."""

    @abstractmethod
    def acquire(self, seq: KVSequence, *, reuse: bool = True) -> Hit:
        """Register the sequence and pin its longest cached prefix (none when reuse is False).

        At most len(seq.tokens) - 1 tokens are given, since the last one must be fed to get logits. Raises ValueError
        when the sequence is already known.
        """

    @abstractmethod
    def reserve(self, seq: KVSequence, upto: int, ahead: int = 0) -> Reservation | None:
        """Make room for tokens [0, upto): absolute and idempotent. None = not enough pages, and nothing changed.

        Groups without a window take room for [0, ahead) at once, so that a prompt fed in chunks does not run out
        half-way; a window group need not, since its pages come back.

        It may also put cached pages in place of the sequence's own that hold the same tokens. Pages in [written so far,
        upto) that are shared are replaced by private copies (COPY ops): the sequence is about
        to write there. "Written so far" is the largest `upto` of publish, or what acquire or fork gave.
        """

    @abstractmethod
    def publish(self, seq: KVSequence, upto: int) -> None:
        """Tokens [0, upto) are written (the writing plan is enqueued) and their ids are in seq.tokens: others may share
        their pages. The contract of order: any plan launched later sees the pages written. It may feed the last of
        these tokens once more (where a grammar's mask came late), and none before it."""

    @abstractmethod
    def trim(self, seq: KVSequence, length: int) -> None:
        """Give back the pages that lie wholly past `length` tokens (rejected drafts, a shorter bound).

        Lowers "written so far" to `length`: what lay past it may be written anew, with other tokens. ValueError where
        the token at `length` would look back at pages of a window group that were given back.
        """

    @abstractmethod
    def fork(self, parent: KVSequence, child: KVSequence, upto: int) -> Hit:
        """Register child sharing parent's pages of tokens [0, upto), the last one possibly partial.

        No copying yet: that is reserve's when either of them writes to a shared page. A copy runs before its plan's
        forward, so the plan that writes [0, upto) must be launched before the one that child joins; these tokens count
        as written for parent too. Where the parent's window has passed what child would read, this is acquire(child).
        """

    @abstractmethod
    def release(self, seq: KVSequence) -> None:
        """Give up the sequence. Published pages may stay cached; idempotent for unknown sequences."""

    @abstractmethod
    def pages_needed(self, tokens: int, ahead: int | None = None) -> dict[int, int]:
        """Pages per group that a sequence of so many tokens owns when nothing is shared: reserved at once, or with
        `ahead` at most while it grows and plans write up to so many tokens past what is published."""

    @abstractmethod
    def stats(self) -> KVStats:
        """Of all groups together; light."""

    @abstractmethod
    def check(self) -> None:
        """Verify that every page is exactly one of free, cached, owned, and that reference counts add up.

        Raises AssertionError that prints the numbers. May be slow; tests and idle integrity checks call it.
        """

    @classmethod
    def host_pages(cls, config: object, groups: Sequence[KVGroup]) -> dict[int, int]:
        """Pages 1 .. n of host memory per group that its LOADs and STOREs use; the executor allocates them."""
        return {}

    def reset(self) -> None:
        """Forget every cached (unowned) page; for benchmarks between runs."""
        raise NotImplementedError(f"{type(self).__name__} cannot reset")
