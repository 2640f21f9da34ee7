"""Which linear methods have their experts stacked, and the reasons for those that have not."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dovetail.core.interfaces import PLAIN, ActFormat, Activation, ExpertBias, ExpertShape, LinearShape, Routing
from dovetail.core.layers import packed_linear_experts
from dovetail.core.layers.looped_experts import LoopedExperts
from dovetail.core.layers.packed import PackedLinear
from dovetail.core.layers.packed_linear_experts import PackedLinearExperts
from dovetail.core.layers.plain import PlainLinear
from dovetail.core.ops.weight_formats import E2M1, INT4, INT8, UINT4
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.quant.int4.checkpoint import Stored
from dovetail.plugins.quant.int4.order import set_order, with_order
from dovetail.plugins.quant.int4.quantizer import StoredLinear

from ...layouts import gptq, rounded

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn
SHAPE = ExpertShape(3, 96, 64, torch.bfloat16, names=tuple((f"{e}.gate", f"{e}.up", f"{e}.down") for e in range(3)))


class Packed(PackedLinear):
    def load(self, params, part, tensors):
        raise NotImplementedError


class Multiplies(Packed):
    def apply(self, params, x, bias=None):
        return super().apply(params, x, bias)


class KeepsAll(Packed):
    def finish(self, params):
        super().finish(params)


def created(make, shape: ExpertShape = SHAPE) -> tuple[PackedLinearExperts, dict[str, torch.Tensor]]:
    """`make`: returns the linear method of a path."""
    experts = PackedLinearExperts(SimpleNamespace(linear=lambda path, shape: make(path)), "experts", shape)
    return experts, experts.create(shape, CPU)


def test_tensors_of_all_experts_are_stacked():
    """No workspaces and no counters of single matrices; gate and up, and down, may have unlike formats."""

    def make(path: str) -> PackedLinear:
        if path.endswith("down"):
            return Packed(INT8, 0, row_scale=True)
        return Packed(UINT4, 32, activations=FP8_TOKEN)

    experts, params = created(make)
    assert experts.stacked and experts.input is FP8_TOKEN and not experts.reason()
    assert {name: tuple(x.shape) for name, x in params.items()} == {
        "up.codes": (3, 128, 32),
        "up.scale": (3, 128, 3),
        "up.zero": (3, 128, 3),
        "down.codes": (3, 96, 32),
        "down.scale": (3, 96, 1),
        "down.row_scale": (3, 96),
    }
    assert not any(hasattr(method, "_workspace") for each in experts.methods for method in each)


def test_each_product_has_the_input_format_of_its_methods(monkeypatch):
    experts, params = created(lambda path: Packed(INT4, 32, activations=PLAIN if "down" in path else FP8_TOKEN))
    found = {}
    monkeypatch.setattr(packed_linear_experts, "stacked_gated_experts", lambda *args, **how: found.update(how))
    experts.apply(params, Activation(FP8_TOKEN, torch.empty(0)), None)
    assert found == {"between": PLAIN, "dtype": torch.bfloat16} and experts.input is FP8_TOKEN


class Chooses(Packed):
    """Chooses its input format when its shape and device are known."""

    def __init__(self, activations: ActFormat, chosen: ActFormat) -> None:
        super().__init__(INT4, 32, activations=activations)
        self.chosen = chosen
        if chosen.perm is None:
            self.activations = "auto"  # A package may have a word of its own there: it gives columns no order.

    def prepare(self, shape, device):
        super().prepare(shape, device)
        self.input = self.chosen


def test_prepare_may_choose_the_input_format():
    """Experts in E4M3 take inputs of 16 bits on GPUs without matmuls of E4M3."""
    experts, _ = created(lambda path: Chooses(FP8_TOKEN, PLAIN))
    assert experts.stacked and experts.input is experts.between is PLAIN
    experts, _ = created(lambda path: Chooses(PLAIN, SCALED))
    assert not experts.stacked and "inputs have the format fp8" in experts.reason()
    experts, _ = created(lambda path: Chooses(PLAIN, replace(SCALED, perm=torch.arange(96))))
    assert not experts.stacked and "inputs have the format fp8" in experts.reason()


def stored(path: str, shape: LinearShape, act_order: bool = True) -> StoredLinear:
    return StoredLinear(path, Stored("gptq", 4, 32, True, act_order), shape, PLAIN)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shares", [1, 2])
def test_each_expert_may_have_an_order_of_its_own(biased, shares):
    """The channels between the products are computed in the order of the second one. With shares, this rank has some
    channels of each group."""
    generator = torch.Generator().manual_seed(3)
    shape = replace(SHAPE, dtype=torch.float32)
    if shares > 1:
        shape = replace(shape, intermediate=32, whole_intermediate=64, first_channel=32)
    channels, mine = shape.intermediate, slice(shape.first_channel, shape.first_channel + shape.intermediate)
    stacked, looped = (
        kind(SimpleNamespace(linear=stored), "experts", shape) for kind in (PackedLinearExperts, LoopedExperts)
    )
    params = [experts.create(shape, CPU) for experts in (stacked, looped)]
    assert stacked.stacked and stacked.input is PLAIN
    for expert in range(3):
        of_hidden, of_channels = (torch.randperm(size, generator=generator) for size in (96, 64))
        parts = ("gate", channels, of_hidden), ("up", channels, of_hidden), ("down", 96, of_channels)
        for part, outputs, order in parts:
            made = rounded(torch.randn(outputs, len(order), generator=generator), 4, 32, True)
            taken = order if part != "down" else order[mine]
            scattered = replace(made, codes=made.codes[:, taken], group=made.group[taken])
            tensors = gptq(scattered, offset=0)
            for record in stacked.methods[expert][part == "down"].tensors:
                if record.unpack is not None:
                    tensors[record.name] = record.unpack(tensors[record.name])
            for experts, own in zip((stacked, looped), params, strict=True):
                experts.load(own, expert, part, tensors)
    for experts, own in zip((stacked, looped), params, strict=True):
        experts.finish(own)
    assert all(method.input is PLAIN for each in stacked.methods for method in each), "the orders are stacked"
    x = torch.randn(7, 96, generator=generator)
    routing = Routing(torch.randint(3, (7, 2), generator=generator).int(), torch.rand(7, 2, generator=generator))
    bias = None
    if biased:
        bias = ExpertBias(*(torch.randn(3, size, generator=generator) for size in (2 * channels, 96)))
    given = [Activation(experts.input, x) for experts in (stacked, looped)]
    got, want = (
        experts.apply(own, one, routing, bias=bias)
        for experts, own, one in zip((stacked, looped), params, given, strict=True)
    )
    assert (got - want).norm() < 1e-5 * want.norm()
    assert stacked.down.width > channels if shares > 1 else stacked.down.width == channels


def test_some_experts_with_an_order_are_of_an_unlike_format():
    quantizer = SimpleNamespace(linear=lambda path, shape: stored(path, shape, "1" not in path))
    experts = PackedLinearExperts(quantizer, "experts", SHAPE)
    experts.create(SHAPE, CPU)
    assert not experts.stacked and "experts have unlike formats" in experts.reason()


SCALED = replace(FP8_TOKEN, pre_scale=torch.ones(96))
ORDERED = replace(FP8_TOKEN, perm=torch.arange(96))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: PlainLinear(), "PlainLinear does not store or multiply as PackedLinear does"),
        (lambda path: Multiplies(INT4, 32), "Multiplies does not store or multiply"),
        (lambda path: KeepsAll(INT4, 32), "KeepsAll does not store or multiply"),
        (lambda path: Packed(INT4, 48), "48 inputs share a scale, neither a multiple nor a divisor of 32"),
        (lambda path: Packed(INT4, 32, activations=SCALED), "inputs have the format fp8"),
        (lambda path: Packed(INT4, 32, activations=ORDERED), "inputs have the format fp8"),
        (lambda path: Packed(INT4, 32, activations=ActFormat("int8", torch.int8, "token")), "the format int8"),
        (lambda path: Packed(INT4, 32 if "1" in path else 64), "experts have unlike formats"),
        (lambda path: Packed(INT4, 32, row_scale="1.down" in path), "experts have unlike formats"),
    ],
)
def test_other_methods_keep_their_own_tensors(make, reason):
    experts, params = created(make)
    assert not experts.stacked and reason in experts.reason()
    assert {name.rsplit(".", 1)[0] for name in params} == {f"{e}.{side}" for e in range(3) for side in ("up", "down")}


class Ordered(Packed):
    """Has an order for the columns of down."""

    def __init__(self, path: str, shape: LinearShape) -> None:
        down = path.endswith("down")
        super().__init__(UINT4 if down else E2M1, 32 if down else 16, scale_dtype=FP8)
        if down:
            self.input = with_order(PLAIN, shape.inp, CPU)
            set_order(self.input, torch.randperm(shape.inp))

    def load(self, params, part, tensors):
        self.store(params, part, tensors["codes"], tensors["scale"], tensors["zero"] if self.format.zero else None)


def test_scales_in_e4m3_are_words_which_move_with_their_rows():
    """With zeros they are no words, since kernels read zeros in the order of scales."""
    shape = replace(SHAPE, dtype=torch.float32, hidden=112)
    stacked = PackedLinearExperts(SimpleNamespace(linear=Ordered), "experts", shape)
    looped = LoopedExperts(SimpleNamespace(linear=Ordered), "experts", shape)
    looped.methods = [(up, copy(down)) for up, down in stacked.methods]
    every = [(experts, experts.create(shape, CPU)) for experts in (stacked, looped)]
    params = every[0][1]
    found = {name: (x.dtype, tuple(x.shape), x.stride()[1:]) for name, x in params.items() if "codes" not in name}
    assert found == {
        "up.scale": (torch.int32, (3, 128, 2), (1, 128)),
        "down.scale": (FP8, (3, 112, 2), (1, 112)),
        "down.zero": (torch.uint8, (3, 112, 2), (1, 112)),
        "down.order": (torch.int32, (3, 64), (1,)),
    }
    for expert in range(3):
        for part, outputs, inputs, group in (("gate", 64, 112, 16), ("up", 64, 112, 16), ("down", 112, 64, 32)):
            tensors = {
                "codes": torch.randint(16, (outputs, inputs), dtype=torch.uint8),
                "scale": torch.rand(outputs, inputs // group).to(FP8),
                "zero": torch.randint(16, (outputs, inputs // group), dtype=torch.uint8),
            }
            for experts, own in every:
                experts.load(own, expert, part, tensors)
    for experts, own in every:
        experts.finish(own)
    x = torch.randn(7, 112)
    routing = Routing(torch.randint(3, (7, 2)).int(), torch.rand(7, 2))
    got, want = (experts.apply(own, Activation(experts.input, x), routing) for experts, own in every)
    assert (got - want).norm() < 1e-5 * want.norm()
