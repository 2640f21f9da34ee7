from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import settings

from dovetail.core.interfaces import KVAllocator, KVGroup
from dovetail.core.testing.kv_cache import KVAllocatorContract
from dovetail.plugins.kv_cache.config import ContiguousConfig, PagedConfig, PrefixHashConfig, RadixConfig
from dovetail.plugins.kv_cache.contiguous import ContiguousAllocator
from dovetail.plugins.kv_cache.paged import PagedAllocator
from dovetail.plugins.kv_cache.prefix_hash import PrefixHashAllocator
from dovetail.plugins.kv_cache.radix import RadixAllocator


class TestPaged(KVAllocatorContract):
    reuses = False

    def make(self, groups: Sequence[KVGroup], num_pages: Mapping[int, int]) -> KVAllocator:
        return PagedAllocator(PagedConfig(), groups, num_pages)


class TestContiguous(KVAllocatorContract):
    reuses = False
    contiguous = True
    slides = False

    def make(self, groups: Sequence[KVGroup], num_pages: Mapping[int, int]) -> KVAllocator:
        return ContiguousAllocator(ContiguousConfig(), groups, num_pages)


class TestPrefixHash(KVAllocatorContract):
    def make(self, groups: Sequence[KVGroup], num_pages: Mapping[int, int]) -> KVAllocator:
        return PrefixHashAllocator(PrefixHashConfig(), groups, num_pages)


class TestPrefixHashCost(KVAllocatorContract):
    machine_settings = settings(KVAllocatorContract.machine_settings, max_examples=30)

    def make(self, groups: Sequence[KVGroup], num_pages: Mapping[int, int]) -> KVAllocator:
        return PrefixHashAllocator(PrefixHashConfig(eviction="cost"), groups, num_pages)


class TestPrefixHashWithHostPages(KVAllocatorContract):
    def make(self, groups: Sequence[KVGroup], num_pages: Mapping[int, int]) -> KVAllocator:
        return PrefixHashAllocator(PrefixHashConfig(host_pages=9), groups, num_pages)


class TestRadix(KVAllocatorContract):
    slides = False

    def make(self, groups: Sequence[KVGroup], num_pages: Mapping[int, int]) -> KVAllocator:
        return RadixAllocator(RadixConfig(), groups, num_pages)


class TestRadixOfWholePages(KVAllocatorContract):
    machine_settings = settings(KVAllocatorContract.machine_settings, max_examples=30)

    slides = False

    def make(self, groups: Sequence[KVGroup], num_pages: Mapping[int, int]) -> KVAllocator:
        return RadixAllocator(RadixConfig(exact=False, eviction="cost"), groups, num_pages)


class TestRadixWithHostPages(KVAllocatorContract):
    slides = False

    def make(self, groups: Sequence[KVGroup], num_pages: Mapping[int, int]) -> KVAllocator:
        return RadixAllocator(RadixConfig(host_pages=9), groups, num_pages)


def test_the_suite_must_be_given_an_allocator() -> None:
    with pytest.raises(NotImplementedError):
        KVAllocatorContract().make((), {})
