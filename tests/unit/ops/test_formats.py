"""Division of activation formats between a fused kernel and later encoding."""

from dataclasses import replace

import pytest
import torch

from dovetail.core.interfaces import PLAIN, ActFormat, Sums
from dovetail.core.ops import encode
from dovetail.core.ops.formats import distinct, plan_emit, why_unfused, with_sums
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
        (ActFormat("odd sums", group="token", encode=object(), sums=Sums(96)), "96"),
        (replace(PERMUTED, places=torch.tensor([1, 2, 0]), sums=Sums(64)), "in another order"),
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


def test_parts_add_up_to_sums():
    """37 columns in runs of 16: of numbers of different sizes, three parts have all bits of a float32."""
    values_TC = torch.randn(3, 37) * 2.0 ** torch.randint(-9, 9, (3, 37))
    fmt = ActFormat("summed", sums=Sums(16, 2, 3), reference=lambda x: (x, None))
    sums_TRN = encode(values_TC, (fmt,))[fmt].sums.view(3, 3, 8)
    assert sums_TRN.dtype is torch.bfloat16 and torch.equal(sums_TRN[:, :, 0:6:2], sums_TRN[:, :, 1:6:2])
    assert not sums_TRN[:, :, 6:].any()
    expected_TR = torch.stack([values_TC[:, at : at + 16].double().sum(1) for at in (0, 16, 32)], 1)
    torch.testing.assert_close(sums_TRN[:, :, ::2].double().sum(2), expected_TR, rtol=1e-6, atol=1e-4)
    assert encode(values_TC)[PLAIN].sums is None
    for rows in (1, 4):
        assert encode(torch.ones(rows, 37), (fmt,))[fmt].sums is None, "too few or too many rows for the consumer"


def test_a_format_with_sums_serves_the_same_without():
    """One encoding serves experts, which need none, and layers beside them."""
    base = replace(FUSABLE, reference=lambda x: (2 * x, None))
    summed, other = with_sums(base, Sums(64)), with_sums(base, Sums(32))
    assert summed is with_sums(base, Sums(64)) is not other and (summed.sums, summed.base) == (Sums(64), base)
    assert with_sums(base, None) is base
    assert all(with_sums(fmt, Sums(64)) is fmt for fmt in (PERMUTED, PLAIN))
    assert distinct((base, PLAIN, summed)) == (PLAIN, summed) and distinct((base, PLAIN)) == (base, PLAIN)
    plan = plan_emit((base, summed))
    assert (plan.plain, plan.fused, plan.rest) == (False, summed, ())
    bundle = encode(torch.ones(1, 64), (base, summed))
    assert len(bundle.items) == 1 and bundle[base].format is base
    assert bundle[base].values is bundle[summed].values and bundle[base].sums is None is not bundle[summed].sums
    # Who asks for other sums gets those, and none from who does not add up.
    both = encode(torch.ones(1, 64), (summed, base, other))
    assert [len(both[fmt].sums[0]) for fmt in (summed, other)] == [8, 16]
    assert encode(torch.ones(1, 64), (base,))[summed].sums is None
    with pytest.raises(KeyError, match="was not emitted"):
        both[FUSABLE]


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
