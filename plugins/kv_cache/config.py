"""Options of the built-in KV allocators."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from dovetail.core.compose import Config


class ContiguousConfig(Config):
    """One run of pages for the sequence's greatest length, taken at admission: the baseline of paging (Kwon et al.
    2023)."""


class PagedConfig(Config):
    """Pages from a free list, no reuse between sequences (PagedAttention, Kwon et al. 2023)."""


POLICIES = ("lru", "fifo", "lfu", "cost")
"""Built-in eviction policies (dovetail.core.memory.eviction)."""


def _names_a_policy(value: str) -> str:
    if value not in POLICIES and not all(value.partition(":")):
        raise ValueError(f"{value!r} is neither one of {', '.join(POLICIES)} nor package.module:Class")
    return value


Eviction = Annotated[str, AfterValidator(_names_a_policy)]


class CachingConfig(Config):
    """Which unowned pages stay cached, and where."""

    host_pages: int = Field(0, ge=0)
    """Pages of host memory per KV group. They keep pages that the device evicts and restore them on a hit. 0 = none."""
    host_gib: float = Field(0, ge=0)
    """The same in GiB on each rank, over all groups; instead of host_pages."""

    eviction: Eviction = "lru"
    """Policy that selects the unowned page to evict: lru, fifo, lfu, cost (cheapest to recompute), or
    "package.module:Class" of an EvictionPolicy."""

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.host_pages and self.host_gib:
            raise ValueError(f"host_pages={self.host_pages} and host_gib={self.host_gib}: give one of them")
        return self


class RadixConfig(CachingConfig):
    """Paged, with prefixes shared to the token through a radix tree (RadixAttention, Zheng et al. 2023)."""

    exact: bool = True
    """Whether a hit may end inside a page, which is then copied on the device; false: hits are whole pages."""


class PrefixHashConfig(CachingConfig):
    """Paged, with full pages of equal prefixes shared through chained hashes (as in vLLM)."""
