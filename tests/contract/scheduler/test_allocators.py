"""Scheduler suite with the allocators that test_builtin omits: two policies each, to limit the time."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from typing import ClassVar

import pytest

from dovetail.core.interfaces import KVAllocator, KVGroup, Scheduler, SchedulerLimits
from dovetail.core.testing.reference import build
from dovetail.core.testing.scheduler import SchedulerContract
from dovetail.plugins.kv_cache import COMPONENTS
from dovetail.plugins.kv_cache.config import PrefixHashConfig
from dovetail.plugins.kv_cache.prefix_hash import PrefixHashAllocator
from dovetail.plugins.scheduler.config import FCFSConfig, PriorityConfig
from dovetail.plugins.scheduler.fcfs import FCFSScheduler
from dovetail.plugins.scheduler.priority import PriorityScheduler

ALLOCATORS = [c.name for c in COMPONENTS if c.name not in ("paged", "prefix_hash")]


class OnAllocator(SchedulerContract):
    loads: ClassVar[int] = SchedulerContract.loads if os.environ.get("DOVETAIL_GRID") == "pairs" else 2

    @pytest.fixture(params=ALLOCATORS, autouse=True)
    def _allocator(self, request: pytest.FixtureRequest) -> None:
        self.allocator = request.param

    def make_kv(self, groups: Seq[KVGroup], num_pages: dict[int, int]) -> KVAllocator:
        made: KVAllocator = build("kv_cache", self.allocator, groups=groups, num_pages=num_pages)
        return made


class TestFCFSWithHostPages(SchedulerContract):
    def make_kv(self, groups: Seq[KVGroup], num_pages: dict[int, int]) -> KVAllocator:
        return PrefixHashAllocator(PrefixHashConfig(host_pages=20), groups, num_pages)

    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        return FCFSScheduler(FCFSConfig(), limits, kv)


class TestFCFS(OnAllocator):
    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        return FCFSScheduler(FCFSConfig(), limits, kv)


class TestPriority(OnAllocator):
    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        return PriorityScheduler(PriorityConfig(), limits, kv)
