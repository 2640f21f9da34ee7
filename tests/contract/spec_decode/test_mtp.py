"""Contract suite for drafts of the checkpoint's layer for multi-token prediction, over a small DeepSeek V3."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from dovetail.core.compose import Selected
from dovetail.core.interfaces import Drafter, Hidden, TargetView
from dovetail.core.testing.executor_scripts import small_composition
from dovetail.core.testing.spec_decode import DrafterContract
from dovetail.plugins.spec_decode.mtp import MTP

from ..faults import rejects, suite, variant

pytestmark = pytest.mark.nightly


@cache
def selected(*words: str) -> Selected:
    return small_composition("spec_decode=mtp", "spec_decode.lookahead=3", *words).part("spec_decode")


def loud(drafter: Any) -> Any:
    """Multiply random weights, whose drafts would else hardly depend on hidden states."""
    bind = drafter.bind

    def bind_loudly(view: TargetView) -> None:
        bind(view)
        layer = drafter.layer.layer
        for linear in (layer.pair, layer.block.attention.down, layer.block.attention.o):
            linear.params["weight"].mul_(20)

    drafter.bind = bind_loudly
    return drafter


class TestMTP(DrafterContract):
    slots, vocab, mtp = 3, 19, True

    def make(self) -> Drafter:
        return loud(selected().build())


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        # After a prefix hit it lacks the state of the last cached token.
        ({"follows_features": False}, "test_pages_of_a_shared_prefix_serve_as_its_own"),
        # It takes the state of a token for the one before it.
        ({"features_of": lambda self, hidden: (_later(hidden),)}, "test_chunks_of_a_prompt_change_no_draft"),
    ],
)
def test_a_drafter_that_loses_states_is_rejected(fault: dict[str, Any], test: str) -> None:
    def make(self: DrafterContract) -> Drafter:
        # Probabilities are compared, too.
        return loud(variant(MTP, "Broken", **fault)(selected("spec_decode.verify=rejection").config))

    assert rejects(suite(TestMTP, make=make), test)


def _later(hidden: Hidden) -> torch.Tensor:
    return hidden.states.roll(1, 0)
