"""Options of the built-in KV allocators."""

from __future__ import annotations

from pydantic import field_validator

from dovetail.core.compose import Config


class PagedConfig(Config):
    """Pages in a free list, nothing reused between sequences (PagedAttention, Kwon et al. 2023)."""


class PrefixHashConfig(Config):
    """Paged, and full pages of equal prefixes are shared, found by a chained hash (as in vLLM)."""

    eviction: str = "lru"
    """Which unowned page goes first: lru, fifo, or "package.module:Class" with the methods of EvictionPolicy."""

    @field_validator("eviction")
    @classmethod
    def _names_a_policy(cls, value: str) -> str:
        if value not in ("lru", "fifo") and not all(value.partition(":")):
            raise ValueError(f"{value!r} is neither lru nor fifo nor package.module:Class")
        return value
