"""Contract suite for every built-in scheduler and allocator."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from itertools import product
from typing import ClassVar

import pytest

from dovetail.core.interfaces import KVAllocator, KVGroup, Scheduler, SchedulerLimits
from dovetail.core.testing.reference import build
from dovetail.core.testing.scheduler import SchedulerContract
from dovetail.plugins.kv_cache import COMPONENTS
from dovetail.plugins.kv_cache.config import PrefixHashConfig
from dovetail.plugins.kv_cache.prefix_hash import PrefixHashAllocator
from dovetail.plugins.scheduler import config as options
from dovetail.plugins.scheduler.deadline import DeadlineScheduler
from dovetail.plugins.scheduler.fair import FairScheduler
from dovetail.plugins.scheduler.fcfs import FCFSScheduler
from dovetail.plugins.scheduler.longest_prefix import LongestPrefixScheduler
from dovetail.plugins.scheduler.priority import PriorityScheduler
from dovetail.plugins.scheduler.shortest_job import ShortestJobScheduler
from dovetail.plugins.scheduler.static import StaticScheduler

SCHEDULERS = {
    "fcfs": (FCFSScheduler, options.FCFSConfig()),
    "fcfs in small chunks": (FCFSScheduler, options.FCFSConfig(max_chunk=3)),
    "fcfs with whole prompts": (FCFSScheduler, options.FCFSConfig(chunked=False)),
    "static": (StaticScheduler, options.StaticConfig()),
    "static pairs": (StaticScheduler, options.StaticConfig(batch_size=2)),
    "priority": (PriorityScheduler, options.PriorityConfig()),
    # So slow that it never differs between two runs of a test.
    "priority that ages": (PriorityScheduler, options.PriorityConfig(age_seconds=1e6)),
    "longest prefix": (LongestPrefixScheduler, options.LongestPrefixConfig(window=5, max_wait=1e6)),
    "shortest job": (ShortestJobScheduler, options.ShortestJobConfig(max_wait=1e6)),
    "shortest job without patience": (ShortestJobScheduler, options.ShortestJobConfig(max_wait=0)),
    "fair": (FairScheduler, options.FairConfig(quantum=20, weights={"a": 2.5})),
    "deadline": (DeadlineScheduler, options.DeadlineConfig()),
}
SAME_POLICY = ("fcfs in small chunks", "static pairs", "shortest job without patience")
"""Schedulers that differ from another one of the list in an option, which the nightly script adds."""
FULL = os.environ.get("DOVETAIL_GRID") == "pairs"
ALLOCATORS = sorted(component.name for component in COMPONENTS)
PAIRS = list(product(SCHEDULERS, ALLOCATORS))
if not FULL:
    # Every scheduler class once, most with the default allocator, and every allocator once.
    PAIRS = [(name, "prefix_hash") for name in SCHEDULERS if name not in ("priority", *SAME_POLICY)]
    PAIRS += [("priority", name) for name in ALLOCATORS if name != "prefix_hash"]


class TestEveryScheduler(SchedulerContract):
    oldest_first: ClassVar[bool] = True
    # Most of them share one policy implementation, so CI runs few examples; the nightly script runs the suite's own
    # number.
    loads: ClassVar[int] = SchedulerContract.loads if FULL else 1

    @pytest.fixture(params=PAIRS, ids=", ".join, autouse=True)
    def _parts(self, request: pytest.FixtureRequest) -> None:
        self.scheduler, self.allocator = request.param

    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        scheduler, config = SCHEDULERS[self.scheduler]
        return scheduler(config, limits, kv)

    def make_kv(self, groups: Seq[KVGroup], num_pages: dict[int, int]) -> KVAllocator:
        return build("kv_cache", self.allocator, groups=groups, num_pages=num_pages)


class TestFCFSWithHostPages(SchedulerContract):
    def make_kv(self, groups: Seq[KVGroup], num_pages: dict[int, int]) -> KVAllocator:
        return PrefixHashAllocator(PrefixHashConfig(host_pages=20), groups, num_pages)

    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        return FCFSScheduler(options.FCFSConfig(), limits, kv)
