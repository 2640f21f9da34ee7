"""Division of activation formats between a fused kernel and later encoding."""

from dataclasses import replace

import pytest
import torch

from dovetail.core.interfaces import PLAIN, ActFormat
from dovetail.core.ops import encode
from dovetail.core.ops.formats import plan_emit, why_unfused
from dovetail.core.startup_notes import collect_notes, note

FUSABLE = ActFormat("fusable", group="token", encode=object())
PERMUTED = ActFormat(
    "permuted", group="token", encode=object(), perm=torch.tensor([2, 0, 1]), reference=lambda x: (x, None)
)


def test_one_encoded_format_is_fused_and_the_rest_come_from_plain():
    other = ActFormat("other", group="token", encode=object())
    plan = plan_emit((FUSABLE, other))
    assert (plan.plain, plan.fused, plan.rest) == (True, FUSABLE, (other,))
    assert not plan_emit((FUSABLE,)).plain


@pytest.mark.parametrize(
    ("fmt", "reason"),
    [
        (ActFormat("bare"), "no Triton"),
        (PERMUTED, "no inverse"),
        (replace(PERMUTED, places=torch.tensor([1, 2, 0]), group=32), "another column order"),
        (ActFormat("dynamic", group="tensor", encode=object()), "whole tensor"),
        (ActFormat("odd", group=48, encode=object()), "48"),
    ],
)
def test_why_unfused_names_the_obstacle(fmt, reason):
    assert reason in why_unfused(fmt)


def test_encode_scales_then_permutes():
    fmt = ActFormat(
        "f", perm=torch.tensor([2, 0, 1]), pre_scale=torch.tensor([1.0, 10.0, 100.0]), reference=lambda x: (x, None)
    )
    bundle = encode(torch.tensor([[1.0, 2.0, 3.0]]), (PLAIN, fmt))
    assert bundle[fmt].values.tolist() == [[300.0, 1.0, 20.0]]
    assert bundle[PLAIN].values.tolist() == [[1.0, 2.0, 3.0]]


def test_a_format_without_any_encoder_is_refused():
    with pytest.raises(ValueError, match="'bare'"):
        encode(torch.ones(1, 2), (ActFormat("bare"),))


def test_each_start_collects_its_own_notes_once():
    note("before any start")
    with collect_notes() as first:
        note("a slow path")
        note("a slow path")
    with collect_notes() as second:
        note("another slow path")
    assert (list(first), list(second)) == (["a slow path"], ["another slow path"])
