"""Dovetail's contract suites, applied to the parts of this package."""

import functools
import itertools
import random

import pytest
from dovetail_lighthouse.config import LighthouseConfig, NoRepeatNgramConfig, StepCsvConfig, ThreeBitsConfig
from dovetail_lighthouse.no_repeat_ngram import NoRepeatNgram
from dovetail_lighthouse.scheduler import Lighthouse
from dovetail_lighthouse.step_csv import StepCsv
from dovetail_lighthouse.three_bits import ThreeBits
from hypothesis import settings

from dovetail import SamplingParams, compose
from dovetail.core.testing.kv_cache import KVAllocatorContract
from dovetail.core.testing.logits import LogitsProcessorContract
from dovetail.core.testing.observer import ObserverContract
from dovetail.core.testing.package import PackageContract
from dovetail.core.testing.quant import QuantizerContract
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


class NoRepeatNgramContract(LogitsProcessorContract):
    size = 1

    def make(self):
        return NoRepeatNgram(NoRepeatNgramConfig())

    def active_params(self):
        return SamplingParams(extra={"no_repeat_ngram": self.size})


class TestUnigrams(NoRepeatNgramContract):
    """No token may occur twice, so every history has a token to ban."""


class TestTrigrams(NoRepeatNgramContract):
    """Histories consist of two tokens, and the prompt has every pair of them, so each has a trigram to ban."""

    size = 3
    prompt = (1, 1, 2, 2, 1)

    def history(self, outputs, seed=0):
        rng = random.Random(seed)
        return [*self.prompt, *(rng.choice((1, 2)) for _ in range(outputs))]


class TestThreeBits(QuantizerContract):
    error = 0.34  # the mean over products of one token, 0.18, plus six standard deviations

    def make(self):
        return ThreeBits(ThreeBitsConfig())


class TestStepCsv(ObserverContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.paths = (str(tmp_path / f"{i}.csv") for i in itertools.count())

    def make(self):
        return StepCsv(StepCsvConfig(path=next(self.paths)))
