"""Experts of each weight format that move between ranks give the same results. Formats that cannot move are refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import Collective, ModelSpec, Quantizer, Routing
from dovetail.core.layers import Experts, dummy_weights, load_weights
from dovetail.core.ops import encode
from dovetail.core.testing.model_driver import build_context
from dovetail.core.testing.rank_threads import on_threads
from dovetail.core.worker.build import build_quantizer, check_weights
from dovetail.core.worker.expert_moves import ExpertBalancer
from dovetail.plugins.experts.config import WholeConfig
from dovetail.plugins.experts.everywhere import WholePlacement

EXPERTS, SIDE = 8, 64
MOE = ("engine.device=cpu", "model=small_moe", "executor=multiproc", "engine.tp=2", "experts=whole")


def run(ranks: Collective, quantizer: Quantizer, size: int) -> tuple[list[torch.Tensor], ExpertBalancer, list[float]]:
    """Run a layer in steps of which each has the same tokens, one expert each, and others that make some experts hot.
    Return the sums of those tokens."""
    placement = WholePlacement(WholeConfig(redundant=2, rebalance=2))
    placement.bind(ranks, size)
    spec = ModelSpec("none", 1, 1, 1, 1, 1, 1, 1, 1, "float32")
    build = build_context(spec, collective=ranks, placement=placement, quantizer=quantizer)
    names = [(f"{e}.gate", f"{e}.up", f"{e}.down") for e in range(EXPERTS)]
    layer = Experts("layers.0.mlp.experts", names, build, SIDE, 2 * SIDE)
    load_weights(layer.weights(), dummy_weights(layer.weights(), 1, torch.float32, torch.device("cpu")))
    layer.finish()
    balancer = ExpertBalancer(placement, build.placed, depth=1)
    x_TC = torch.randn(EXPERTS + 12, SIDE, generator=torch.Generator().manual_seed(3))
    sums, loads = [], []
    for step in range(13):
        balancer.before_step()
        loads += balancer.take_loads() or ()
        hot = [3 * (step // 4) % EXPERTS] * 10
        experts_T1 = torch.tensor([*range(EXPERTS), *hot, -1, -1], dtype=torch.int32)[:, None]
        sent = layer.dispatch(encode(x_TC, (layer.input,)), Routing(experts_T1, torch.ones(len(x_TC), 1)))
        sums.append(ranks.all_reduce(layer.multiply(sent))[:EXPERTS])
    return sums, balancer, loads


@pytest.mark.parametrize("quant", ["fp8", "fp4 quant.block=32 quant.layers=experts"])
def test_moves_change_no_result(quant: str) -> None:
    quantizer = build_quantizer(compose([*MOE, *f"quant={quant}".split()], app="generate"))
    found = on_threads(2, partial(run, quantizer=quantizer, size=2))
    for sums, balancer, loads in found:
        assert sums[0].abs().amax(1).min() > 1e-3
        for each in sums:
            # Products of more rows add in another order.
            torch.testing.assert_close(each, sums[0], rtol=0, atol=1e-6 * float(sums[0].abs().max()))
        assert balancer.moved == found[0][1].moved >= 3
        assert loads == found[0][2] and len(loads) == 10
        assert set(loads[1::2]) == {9.0}, "18 tokens of each step have an expert"
        assert all(greatest >= 9.0 for greatest in loads[::2]) and max(loads[::2]) > 9.0


def test_formats_that_cannot_move_are_refused() -> None:
    """Before memory is taken."""
    words = "experts.rebalance=4", "quant=fp8", "quant.scales=tensor"
    composition = compose([*MOE, *words], app="generate")
    with pytest.raises(
        ConfigError, match=r"layers\.0\.mlp\.experts: experts\.rebalance .*Set experts\.rebalance=0, or q"
    ):
        check_weights(composition, build_quantizer(composition), 0, 2)
