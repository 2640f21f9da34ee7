"""The contract suite over every built-in collective."""

from __future__ import annotations

import pytest

from dovetail.core.interfaces import Collective
from dovetail.core.testing.collective import CollectiveContract
from dovetail.plugins.collective.config import NcclConfig, OrderedConfig
from dovetail.plugins.collective.nccl import NcclCollective
from dovetail.plugins.collective.ordered import OrderedCollective


class TestNccl(CollectiveContract):
    """Over gloo."""

    def make(self) -> Collective:
        return NcclCollective(NcclConfig())


class TestOrdered(CollectiveContract):
    def make(self) -> Collective:
        return OrderedCollective(OrderedConfig())


def test_the_suite_must_be_given_a_collective() -> None:
    with pytest.raises(NotImplementedError):
        CollectiveContract().make()


def test_a_suite_inside_a_function_is_refused() -> None:
    class Hidden(CollectiveContract):
        pass

    with pytest.raises(ValueError, match="define it in a module"):
        Hidden().test_all_reduce_sums()
