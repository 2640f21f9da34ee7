"""KV allocator contract: which pages hold which sequence's keys and values. It handles page ids, never tensors.

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
    """Shape per token, for instance (kv_heads, head_dim)."""
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
    """Tokens that a window group looks back, the current one included. Pages that left the window are given back."""
    page_tokens: int = 16

    @property
    def bytes_per_page(self) -> int:
        """Bytes per page over all layers and planes."""
        return self.page_tokens * len(self.layers) * sum(p.bytes_per_token for p in self.planes)

    def pages_behind(self, position: int) -> int:
        """Number of leading page-table entries that no token at `position` or later can read; 0 without a window."""
        return max(position - self.window + 1, 0) // self.page_tokens if self.window else 0

    def tokens_held(self, tokens: int, ahead: int) -> int:
        """Most token slots that a sequence of `tokens` tokens holds, if plans write up to `ahead` unpublished ones."""
        return min(tokens, self.window + ahead + self.page_tokens - 1) if self.window else tokens


class KVSequence(Protocol):
    """The part of a sequence that an allocator reads. dovetail.core.interfaces.Sequence implements it."""

    @property
    def uid(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def salt(self) -> str: ...
    @property
    def limit(self) -> int:
        """Expected maximum length in tokens, for allocators that reserve ahead."""
        ...


PageEntry = tuple[int, int, int]
"""(group, index in the sequence's page table, page id)"""


@dataclass(frozen=True, slots=True)
class Hit:
    """A cached prefix, pinned for the sequence."""

    tokens: int = 0
    """Prefix tokens whose KV the sequence now shares; less than len(seq.tokens). The last page may be partly filled:
    reserve then copies it, as after fork."""
    entries: tuple[PageEntry, ...] = ()
    ops: tuple[PageOp, ...] = ()
    """LOADs that bring host or remote pages in before they are read, and STOREs of the pages they evict. They must run
    in call order, even if the sequence is released first: other sequences may already have found these pages."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Page-table changes that make room. Empty if nothing changed."""

    entries: tuple[PageEntry, ...] = ()
    ops: tuple[PageOp, ...] = ()
    """Operations that must run, in order, before the plan's forward."""


@dataclass(frozen=True, slots=True)
class KVStats:
    """Counters over all groups."""

    pages: int
    free: int
    """Pages with nothing to reuse in them: never written, or given back."""
    cached: int
    """Pages that no sequence owns and that are kept for reuse. They can be evicted."""
    owned: int
    """Pages that at least one sequence owns."""
    used_tokens: int
    """Token slots in owned pages that were requested from reserve. The other owned slots are waste."""
    owned_tokens: int
    """Token slots in owned pages."""
    evictions: int = 0
    """Cached pages evicted since start. (The engine counts cache hits.)"""
    host_pages: int = 0
    """Host pages with contents."""
    loads: int = 0
    """Pages copied back from host memory since start."""
    stores: int = 0
    """Pages copied to host memory since start."""

    @property
    def waste(self) -> float:
        """Fraction of owned token slots that are not requested yet: ends of last pages, and slots reserved ahead."""
        return 1 - self.used_tokens / self.owned_tokens if self.owned_tokens else 0.0


class KVAllocator(ABC):
    """Owns the pages 1 .. num_pages[g] of each group g. Page 0 belongs to the core, for padding.

    A sequence is known from its first acquire, fork or reserve until release. publish, trim and fork raise ValueError
    if the sequence (for fork: the parent) is not known. Every call succeeds in all groups or changes nothing. Calls
    cost O(pages touched), never O(pages cached). seq.tokens only grows, except past the length given to trim.

    In a window group a sequence owns no page that is outside the window of every token still to be fed: publish(upto)
    gives back the first group.pages_behind(upto - 1) pages of its table, and a hit of n tokens has entries only from
    group.pages_behind(n) on. Plans in flight may still read these pages; their next owner writes to them in a later
    plan. An allocator may keep them and treat a window group like any other; pages_needed must then count them.
    """

    def __init__(self, config: object, groups: Sequence[KVGroup], num_pages: Mapping[int, int]) -> None:
        self.config, self.groups, self.num_pages = config, tuple(groups), dict(num_pages)

    @abstractmethod
    def peek(self, seq: KVSequence) -> int:
        """Number of prefix tokens that acquire would find now. Changes nothing."""

    @abstractmethod
    def acquire(self, seq: KVSequence, *, reuse: bool = True) -> Hit:
        """Register the sequence and pin its longest cached prefix (no prefix if reuse is False): at most
        len(seq.tokens) - 1 tokens, because the last one must be fed to get logits. Raises ValueError if the sequence is
        already known."""

    @abstractmethod
    def reserve(self, seq: KVSequence, upto: int, ahead: int = 0) -> Reservation | None:
        """Make room for tokens [0, upto), an absolute and idempotent bound. Returns None if pages are short.

        Groups without a window also reserve [0, ahead), so that a prompt fed in chunks does not run out of pages
        half-way. Window groups need not, since they give pages back.

        The call may replace the sequence's own pages by cached pages with the same tokens. Shared pages in [written so
        far, upto) are replaced by private copies (COPY ops), because the sequence is about to write there. "Written so
        far" is the largest `upto` passed to publish, or the length given by acquire or fork.
        """

    @abstractmethod
    def publish(self, seq: KVSequence, upto: int) -> None:
        """Declare tokens [0, upto) written, so that other sequences may share their pages. The plan that writes them
        must be enqueued and their ids must be in seq.tokens.

        Ordering contract: every plan launched later sees these pages written. Such a plan may feed the last of these
        tokens once more (if a grammar mask was late), but none before it.
        """

    @abstractmethod
    def trim(self, seq: KVSequence, length: int) -> None:
        """Give back the pages that are entirely past `length` tokens (after rejected drafts, or for a shorter bound).

        Lowers "written so far" to `length`: tokens past it may be written again, with other ids. Raises ValueError if
        the token at `length` would read pages of a window group that were given back.
        """

    @abstractmethod
    def fork(self, parent: KVSequence, child: KVSequence, upto: int) -> Hit:
        """Register the child, which shares the parent's pages of tokens [0, upto), the last perhaps partly filled.

        Nothing is copied yet: reserve copies a shared page when either sequence writes to it. A copy runs before its
        plan's forward, so the plan that writes [0, upto) must be launched before the plan that the child joins. These
        tokens then count as written for the parent too. If the parent's window has passed pages that the child would
        read, this is acquire(child).
        """

    @abstractmethod
    def release(self, seq: KVSequence) -> None:
        """Remove the sequence. Published pages may stay cached. Unknown sequences are ignored."""

    @abstractmethod
    def pages_needed(self, tokens: int, ahead: int | None = None) -> dict[int, int]:
        """Pages per group that a sequence of `tokens` tokens owns if it shares none. Without `ahead`: reserved in one
        call. With `ahead`: the maximum while it grows and plans write up to `ahead` tokens past the published ones."""

    @abstractmethod
    def stats(self) -> KVStats:
        """Return the counters. Must be cheap."""

    @abstractmethod
    def check(self) -> None:
        """Verify that every page is exactly one of free, cached and owned, and that reference counts add up. Raises
        AssertionError with the numbers. May be slow; tests and idle integrity checks call it."""

    @classmethod
    def host_pages(cls, config: object, groups: Sequence[KVGroup]) -> dict[int, int]:
        """Number of host pages per group (ids 1 .. n) that LOADs and STOREs use. The executor allocates them."""
        return {}

    def reset(self) -> None:
        """Drop all cached (unowned) pages, for benchmarks between runs."""
        raise NotImplementedError(f"{type(self).__name__} cannot reset")
