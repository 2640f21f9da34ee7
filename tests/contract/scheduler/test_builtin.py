"""The contract suite over every built-in scheduler and allocator."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from dovetail.core.interfaces import KVAllocator, KVGroup, Scheduler, SchedulerLimits
from dovetail.core.testing.scheduler import SchedulerContract
from dovetail.plugins.kv_cache.config import PagedConfig, PrefixHashConfig
from dovetail.plugins.kv_cache.paged import PagedAllocator
from dovetail.plugins.kv_cache.prefix_hash import PrefixHashAllocator
from dovetail.plugins.scheduler.config import FCFSConfig, StaticConfig
from dovetail.plugins.scheduler.fcfs import FCFSScheduler
from dovetail.plugins.scheduler.static import StaticScheduler


@pytest.fixture(params=["paged", "prefix_hash"], autouse=True)
def allocator(request: pytest.FixtureRequest) -> None:
    request.instance.allocator = request.param


class _OnEveryAllocator(SchedulerContract):
    allocator: str

    def make_kv(self, groups: Seq[KVGroup], num_pages: dict[int, int]) -> KVAllocator:
        if self.allocator == "paged":
            return PagedAllocator(PagedConfig(), groups, num_pages)
        return PrefixHashAllocator(PrefixHashConfig(), groups, num_pages)


class TestFCFS(_OnEveryAllocator):
    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        return FCFSScheduler(FCFSConfig(), limits, kv)


class TestFCFSInSmallChunks(_OnEveryAllocator):
    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        return FCFSScheduler(FCFSConfig(max_chunk=3), limits, kv)


class TestStatic(_OnEveryAllocator):
    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        return StaticScheduler(StaticConfig(), limits, kv)


class TestStaticPairs(_OnEveryAllocator):
    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        return StaticScheduler(StaticConfig(batch_size=2), limits, kv)
