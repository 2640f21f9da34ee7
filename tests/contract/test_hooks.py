"""A suite whose hooks are not overridden says so."""

from __future__ import annotations

from inspect import signature

import pytest

from dovetail.core.testing.adapter import AdaptersContract
from dovetail.core.testing.app import AppContract
from dovetail.core.testing.attention import AttentionContract
from dovetail.core.testing.collective import CollectiveContract
from dovetail.core.testing.cost import CostContract
from dovetail.core.testing.executor import ExecutorContract
from dovetail.core.testing.grammar import GrammarContract
from dovetail.core.testing.kv_cache import KVAllocatorContract
from dovetail.core.testing.logits import LogitsProcessorContract
from dovetail.core.testing.model import ModelContract
from dovetail.core.testing.observer import ObserverContract
from dovetail.core.testing.quant import QuantizerContract
from dovetail.core.testing.spec_decode import DrafterContract

MAKE = (
    *(AdaptersContract, AppContract, AttentionContract, CollectiveContract, CostContract, DrafterContract),
    *(ExecutorContract, GrammarContract, KVAllocatorContract, LogitsProcessorContract, ModelContract),
    *(ObserverContract, QuantizerContract),
)
OTHERS = [(AdaptersContract, "save"), (LogitsProcessorContract, "active_params"), (ModelContract, "spec")]


@pytest.mark.parametrize(("contract", "hook"), [*((contract, "make") for contract in MAKE), *OTHERS])
def test_a_hook_must_be_overridden(contract: type, hook: str) -> None:
    method = getattr(contract(), hook)
    with pytest.raises(NotImplementedError):
        method(*(None for _ in signature(method).parameters))
