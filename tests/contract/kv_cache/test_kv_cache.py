"""Contract suite for every built-in allocator."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import settings

from dovetail.core.interfaces import KVAllocator, KVGroup
from dovetail.core.testing.kv_cache import KVAllocatorContract
from dovetail.plugins.kv_cache.config import ContiguousConfig, PagedConfig, PrefixHashConfig, RadixConfig
from dovetail.plugins.kv_cache.contiguous import ContiguousAllocator
from dovetail.plugins.kv_cache.paged import PagedAllocator
from dovetail.plugins.kv_cache.prefix_hash import PrefixHashAllocator
from dovetail.plugins.kv_cache.radix import RadixAllocator


class BuiltIn(KVAllocatorContract):
    allocator: Any
    config: Any
    # The nightly script runs the suite's own number of examples.
    machine_settings = (
        KVAllocatorContract.machine_settings
        if os.environ.get("DOVETAIL_GRID") == "pairs"
        else settings(KVAllocatorContract.machine_settings, max_examples=30)
    )

    def make(self, groups: Sequence[KVGroup], num_pages: Mapping[int, int]) -> KVAllocator:
        return self.allocator(self.config, groups, num_pages)


class TestPaged(BuiltIn):
    allocator, config = PagedAllocator, PagedConfig()
    reuses = False


class TestContiguous(BuiltIn):
    allocator, config = ContiguousAllocator, ContiguousConfig()
    reuses, contiguous, slides = False, True, False


class TestPrefixHash(BuiltIn):
    allocator, config = PrefixHashAllocator, PrefixHashConfig()


class TestPrefixHashCost(TestPrefixHash):
    config = PrefixHashConfig(eviction="cost")


class TestPrefixHashWithHostPages(TestPrefixHash):
    config = PrefixHashConfig(host_pages=9)


class TestRadix(BuiltIn):
    allocator, config = RadixAllocator, RadixConfig()
    slides = False


class TestRadixOfWholePages(TestRadix):
    config = RadixConfig(exact=False, eviction="cost")


class TestRadixWithHostPages(TestRadix):
    config = RadixConfig(host_pages=9)
