"""Dovetail's contract suites, applied to the parts of this package."""

import functools
import itertools
import random

import pytest
from dovetail_lighthouse.config import LighthouseConfig, StepCsvConfig
from dovetail_lighthouse.contracts import NoRepeatNgramContract, ThreeBitsContract
from dovetail_lighthouse.scheduler import Lighthouse
from dovetail_lighthouse.step_csv import StepCsv
from hypothesis import settings

from dovetail import compose
from dovetail.core.testing.kv_cache import KVAllocatorContract
from dovetail.core.testing.observer import ObserverContract
from dovetail.core.testing.package import PackageContract
from dovetail.core.testing.scheduler import SchedulerContract


@functools.cache
def composition():
    return compose(["kv_cache.eviction=dovetail_lighthouse.eviction:SegmentedLRU"])


def allocator(groups, num_pages):
    return composition().build("kv_cache", groups=groups, num_pages=num_pages)


class TestPackage(PackageContract):
    package = "dovetail-lighthouse"


class TestNewestFirst(SchedulerContract):
    def make(self, limits, kv):
        return Lighthouse(LighthouseConfig(max_age=3600), limits, kv)


class TestAllLate(SchedulerContract):
    """Uses the allocator with this package's eviction policy."""

    def make(self, limits, kv):
        return Lighthouse(LighthouseConfig(max_age=0), limits, kv)

    def make_kv(self, groups, num_pages):
        return allocator(groups, num_pages)


class TestSegmentedLRU(KVAllocatorContract):
    machine_settings = settings(KVAllocatorContract.machine_settings, max_examples=15)

    def make(self, groups, num_pages):
        return allocator(groups, num_pages)


class TestUnigrams(NoRepeatNgramContract):
    pass


class TestTrigrams(NoRepeatNgramContract):
    """Histories consist of two tokens, and the prompt has every pair of them, so each has a trigram to ban."""

    size = 3
    prompt = (1, 1, 2, 2, 1)

    def history(self, outputs, seed=0):
        rng = random.Random(seed)
        return [*self.prompt, *(rng.choice((1, 2)) for _ in range(outputs))]


class TestThreeBits(ThreeBitsContract):
    pass


class TestStepCsv(ObserverContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.paths = (str(tmp_path / f"{i}.csv") for i in itertools.count())

    def make(self):
        return StepCsv(StepCsvConfig(path=next(self.paths)))
