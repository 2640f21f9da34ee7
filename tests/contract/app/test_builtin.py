"""Contract suite for the built-in apps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dovetail.core.compose import Composition, compose
from dovetail.core.testing.app import AppContract

SMALL = ("engine.device=cpu", "engine.max_len=64", "engine.kv_pages=16", "engine.max_seqs=2")


class TestGenerate(AppContract):
    prompts: ClassVar[Sequence[str]] = ('def f(x, y="a,b"):', "{}")

    def make(self) -> Composition:
        return compose([*SMALL, "generate.max_tokens=2"], app="generate")


class TestPlan(AppContract):
    def make(self) -> Composition:
        return compose(["model=llama3_8b", "cost=h200"], app="plan")


class TestPlugins(AppContract):
    def make(self) -> Composition:
        return compose(["plugins.kind=cost"], app="plugins")


class TestBench(AppContract):
    def make(self) -> Composition:
        return compose([*SMALL, "workload=fixed", "workload.requests=2"], app="bench")


class TestQuantize(AppContract):
    writes = False

    def make(self) -> Composition:
        return compose(["engine.device=cpu", "quantize.output=made"], app="quantize")
