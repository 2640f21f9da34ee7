"""Contract suite for every built-in scheduler and allocator."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from typing import ClassVar

import pytest

from dovetail.core.interfaces import KVAllocator, KVGroup, Scheduler, SchedulerLimits
from dovetail.core.testing.scheduler import SchedulerContract
from dovetail.plugins.kv_cache.config import PagedConfig, PrefixHashConfig
from dovetail.plugins.kv_cache.paged import PagedAllocator
from dovetail.plugins.kv_cache.prefix_hash import PrefixHashAllocator
from dovetail.plugins.scheduler.config import (
    DeadlineConfig,
    FairConfig,
    FCFSConfig,
    LongestPrefixConfig,
    PriorityConfig,
    ShortestJobConfig,
    StaticConfig,
)
from dovetail.plugins.scheduler.deadline import DeadlineScheduler
from dovetail.plugins.scheduler.fair import FairScheduler
from dovetail.plugins.scheduler.fcfs import FCFSScheduler
from dovetail.plugins.scheduler.longest_prefix import LongestPrefixScheduler
from dovetail.plugins.scheduler.priority import PriorityScheduler
from dovetail.plugins.scheduler.shortest_job import ShortestJobScheduler
from dovetail.plugins.scheduler.static import StaticScheduler


@pytest.fixture(params=["paged", "prefix_hash"], autouse=True)
def allocator(request: pytest.FixtureRequest) -> None:
    request.instance.allocator = request.param


class _OnEveryAllocator(SchedulerContract):
    allocator: str
    # Most of them share one policy implementation, so CI runs few examples; the nightly script runs the suite's own
    # number.
    loads: ClassVar[int] = SchedulerContract.loads if os.environ.get("DOVETAIL_GRID") == "pairs" else 2

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


class TestFCFSWithWholePrompts(_OnEveryAllocator):
    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        return FCFSScheduler(FCFSConfig(chunked=False), limits, kv)


class TestStatic(_OnEveryAllocator):
    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        return StaticScheduler(StaticConfig(), limits, kv)


class TestStaticPairs(_OnEveryAllocator):
    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        return StaticScheduler(StaticConfig(batch_size=2), limits, kv)


class TestPriority(_OnEveryAllocator):
    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        return PriorityScheduler(PriorityConfig(), limits, kv)


class TestPriorityThatAges(_OnEveryAllocator):
    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        # So slow that it never differs between two runs of a test.
        return PriorityScheduler(PriorityConfig(age_seconds=1e6), limits, kv)


class TestLongestPrefix(_OnEveryAllocator):
    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        return LongestPrefixScheduler(LongestPrefixConfig(window=5, max_wait=1e6), limits, kv)


class TestShortestJob(_OnEveryAllocator):
    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        return ShortestJobScheduler(ShortestJobConfig(max_wait=1e6), limits, kv)


class TestShortestJobWithoutPatience(_OnEveryAllocator):
    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        return ShortestJobScheduler(ShortestJobConfig(max_wait=0), limits, kv)


class TestFair(_OnEveryAllocator):
    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        return FairScheduler(FairConfig(quantum=20, weights={"a": 2.5}), limits, kv)


class TestDeadline(_OnEveryAllocator):
    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        return DeadlineScheduler(DeadlineConfig(), limits, kv)
