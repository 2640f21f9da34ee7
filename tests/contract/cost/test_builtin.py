"""Contract suite for every built-in cost model, with the numbers of each variant."""

from __future__ import annotations

from typing import ClassVar

from dovetail.core.compose import compose
from dovetail.core.interfaces import CostModel, Formats
from dovetail.core.testing.cost import CostContract


class Variant(CostContract):
    name: ClassVar[str]

    def make(self) -> CostModel:
        cost: CostModel = compose([f"cost={self.name}", "model=llama3_8b"], app="plan").build("cost")
        return cost


class TestNone(Variant):
    name = "none"


class TestH200(Variant):
    name = "h200"


class TestCPU(Variant):
    name = "cpu"
    formats = Formats("float32", 4, 32.0, "float32", 4)


class TestH200Int8(TestH200):
    formats = Formats("bfloat16", 2, 8.0, "int8", 1)
