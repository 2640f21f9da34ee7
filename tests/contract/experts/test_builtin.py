"""Contract suite for every built-in placement of experts."""

from __future__ import annotations

from dovetail.core.interfaces import ExpertPlacement
from dovetail.core.testing.experts import ExpertsContract
from dovetail.plugins.experts.config import TensorConfig, WholeConfig
from dovetail.plugins.experts.everywhere import TensorPlacement, WholePlacement


class TestTensor(ExpertsContract):
    def make(self) -> ExpertPlacement:
        return TensorPlacement(TensorConfig())


class TestWhole(ExpertsContract):
    def make(self) -> ExpertPlacement:
        return WholePlacement(WholeConfig())
