"""Contract suite for every built-in placement of experts."""

from __future__ import annotations

from dovetail.core.interfaces import ExpertPlacement
from dovetail.core.testing.experts import ExpertsContract
from dovetail.plugins.experts.config import AllToAllConfig, GatherConfig, TensorConfig, WholeConfig
from dovetail.plugins.experts.everywhere import TensorPlacement, WholePlacement
from dovetail.plugins.experts.own_rows import AllToAllPlacement, GatherPlacement


class TestTensor(ExpertsContract):
    def make(self) -> ExpertPlacement:
        return TensorPlacement(TensorConfig())


class TestWhole(ExpertsContract):
    def make(self) -> ExpertPlacement:
        return WholePlacement(WholeConfig())


class TestWholeWithCopies(ExpertsContract):
    """A rank has six of eight experts; the others are on the other one alone."""

    layouts = ((2, 2),)

    def make(self) -> ExpertPlacement:
        return WholePlacement(WholeConfig(redundant=4))


class TestGather(ExpertsContract):
    def make(self) -> ExpertPlacement:
        return GatherPlacement(GatherConfig())


class TestAllToAll(ExpertsContract):
    def make(self) -> ExpertPlacement:
        return AllToAllPlacement(AllToAllConfig(check_rows=1))


class TestAllToAllWithLittleRoom(ExpertsContract):
    """Most steps need the second round; some experts have copies."""

    layouts = ((2, 2), (4, 2))

    def make(self) -> ExpertPlacement:
        return AllToAllPlacement(AllToAllConfig(capacity=0.1, redundant=2))
