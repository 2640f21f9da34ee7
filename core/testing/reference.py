"""Built-in components that a suite needs besides the one under test, chosen by name through the registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.core.interfaces import KVAllocator, KVGroup


def default_allocator(groups: Sequence[KVGroup], num_pages: dict[int, int]) -> KVAllocator:
    """Return kv_cache=prefix_hash with its default options."""
    return build("kv_cache", "prefix_hash", groups=groups, num_pages=num_pages)


def allocator_without_reuse(groups: Sequence[KVGroup], num_pages: dict[int, int]) -> KVAllocator:
    """Return kv_cache=paged."""
    return build("kv_cache", "paged", groups=groups, num_pages=num_pages)


def build(kind: str, name: str, **given: Any) -> Any:
    from dovetail.core.compose import installed

    registered = installed().get(kind, name)
    return registered.target()(registered.component.config(), **given)
