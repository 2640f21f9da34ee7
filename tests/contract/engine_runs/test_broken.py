"""Components with a fault that only shows in an engine; the tests in an engine must reject each."""

from __future__ import annotations

import re
import threading
from typing import Any, ClassVar

import pytest
import torch

from dovetail.core.compose import KINDS, Component, Config, Package, Registered, Registry, installed
from dovetail.core.interfaces import LogitsProcessor, Observer
from dovetail.core.testing.engine_runs import EngineRunContract
from dovetail.plugins.kv_cache.paged import PagedAllocator

from ..faults import rejection

pytestmark = pytest.mark.nightly


class Options(Config):
    """No options."""


class Unseeded(LogitsProcessor):
    """Its noise does not come from the request's seed."""

    def allocate(self, slots: int, vocab: int, device: torch.device) -> None: ...

    def wants(self, request: Any) -> bool:
        return True

    def join(self, slot: int, request: Any) -> None: ...

    def apply(self, logits_NV: torch.Tensor, ctx: Any) -> torch.Tensor:
        return logits_NV + 9 * torch.rand(logits_NV.shape)


class LosesPages(PagedAllocator):
    """It keeps the pages of one sequence."""

    def release(self, seq: Any) -> None:
        if seq.request.uid != 0:
            super().release(seq)


class Stays(Observer):
    """Its thread outlives the engine, and so do its tensors."""

    kept: ClassVar[list[torch.Tensor]] = []

    def step(self, record: Any) -> None:
        self.kept.append(torch.zeros(3))
        if not hasattr(self, "thread"):
            self.thread = threading.Thread(target=ENDED.wait, daemon=True)
            self.thread.start()


ENDED = threading.Event()
BROKEN = {
    "test_two_runs_with_equal_seeds_are_equal": ("logits", Unseeded, "different tokens"),
    "test_aborts_and_preemption_leave_nothing": ("kv_cache", LosesPages, r"\d of 8 KV pages have an owner"),
    "test_an_engine_leaves_nothing_behind": ("observer", Stays, r"threads: \d+ became \d+; tensors: \d+ became \d+"),
}


@pytest.mark.parametrize("test", BROKEN)
def test_a_fault_is_found(test: str) -> None:
    kind, fault, says = BROKEN[test]
    ENDED.clear()
    component = Component(
        kind=kind, name="broken", config=Options, target=f"{__name__}:{fault.__name__}", api=KINDS[kind].api
    )
    here = installed()

    class Suite(EngineRunContract):
        name = "broken"
        registry = Registry(
            [*here.registered.values(), Registered(component, Package("broken", "1.0"))], config_dirs=here.config_dirs
        )

    suite = Suite()
    suite.kind = kind
    assert re.search(says, rejection(suite, test))
    ENDED.set()
