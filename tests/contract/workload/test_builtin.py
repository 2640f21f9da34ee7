"""Contract suite for every built-in workload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.core.interfaces import Workload, WorkloadContext
from dovetail.core.testing.workload import WorkloadContract
from dovetail.plugins.workload.config import FixedConfig, PoissonConfig, SharedPrefixConfig, ShareGPTConfig, TraceConfig
from dovetail.plugins.workload.files import ShareGPT, Trace
from dovetail.plugins.workload.synthetic import Fixed, Poisson, SharedPrefix


class TestFixed(WorkloadContract):
    def make(self) -> Workload:
        return Fixed(FixedConfig())


class TestPoisson(WorkloadContract):
    def make(self) -> Workload:
        return Poisson(PoissonConfig(rates=(2.0, 16.0), seconds=40, at_least=100, prompt_tokens=8))


class TestSharedPrefix(WorkloadContract):
    def make(self) -> Workload:
        return SharedPrefix(SharedPrefixConfig(requests=20))


class TestSharedPrefixOfManyLengths(WorkloadContract):
    def make(self) -> Workload:
        return SharedPrefix(SharedPrefixConfig(requests=20, range_ratio=0.5))


def test_a_range_of_lengths_keeps_the_prefix_and_the_mean() -> None:
    ctx, many = WorkloadContext(vocab=100, max_len=2000, seed=3), 4000
    shapes = {"shared_tokens": 8, "own_tokens": 100, "output_tokens": 20}
    found = SharedPrefix(SharedPrefixConfig(requests=many, range_ratio=0.5, **shapes)).requests(ctx)
    (plain,) = SharedPrefix(SharedPrefixConfig(requests=1, **shapes)).requests(ctx)
    assert {request.prompt_ids[:8] for request in found} == {plain.prompt_ids[:8]}
    own, outputs = [len(request.prompt_ids) - 8 for request in found], [request.output_tokens for request in found]
    assert (min(own), max(own), min(outputs), max(outputs)) == (50, 150, 10, 30)
    assert 98 < sum(own) / many < 102 and 19.5 < sum(outputs) / many < 20.5


class TestTrace(WorkloadContract):
    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "trace.jsonl"
        lines = [{"prompt_ids": [1, 2, 3], "output_tokens": 4 + i, "arrival": (9 - i) / 2} for i in range(9)]
        self.path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")

    def make(self) -> Workload:
        return Trace(TraceConfig(path=str(self.path)))


class TestShareGPT(WorkloadContract):
    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "sharegpt.json"
        talks = [
            [{"from": "human", "value": f"What is {i} and why?"}, {"from": "gpt", "value": "A number. " * (1 + i % 7)}]
            for i in range(60)
        ]
        talks += [[], [{"from": "gpt", "value": "begins"}, {"from": "human", "value": "wrongly"}]]
        self.path.write_text(json.dumps([{"id": str(i), "conversations": talk} for i, talk in enumerate(talks)]))

    def make(self) -> Workload:
        return ShareGPT(ShareGPTConfig(path=str(self.path), requests=50, rates=(5.0,)))
