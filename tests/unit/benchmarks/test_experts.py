"""experts.py: the tiles that it tries, and its limit."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="no Triton for this platform")

from dovetail.core.interfaces import MoE, Routing

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SHARED = 227 << 10


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("experts")
    monkeypatch.setattr(module, "device_facts", lambda device: ("GPU", 132, True, SHARED))
    yield module
    for name in ("experts", "timing"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [16, 128])
def test_candidates_fit(script, rows, gated):
    found = list(script.candidates(rows, 2, gated))
    assert len(found) > 10 and all(tile.shared_bytes(2, gated) <= SHARED for tile in found)


def test_candidates_of_packed_experts_fit(script):
    layer = script.PackedLayer.__new__(script.PackedLayer)
    layer.fp8 = False
    found = list(layer.candidates(16, True))
    assert len(found) > 5 and all(script.packed_shared(tile, 2) <= SHARED for tile in found)


def test_drawn_packed_experts_are_finite(script, monkeypatch):
    monkeypatch.setattr(script, "DEVICE", torch.device("cpu"))
    layer = script.PackedLayer(MoE(experts=2, active=1, intermediate=64), 96, "mxfp4", rows=3)
    assert layer.nbytes == 3 * 64 * 96 // 2 + 8 * (2 * 128 + 1 * 96)
    assert layer.multiply(layer.inputs[0], layer.routings[0]).isfinite().all()


@pytest.mark.parametrize(("dtype", "scales"), [("int4", 3), ("int4_a8", 3), ("nvfp4", 1), ("nf4", 4)])
def test_drawn_stacked_experts_are_finite(script, monkeypatch, dtype, scales):
    """`scales`: bytes of a group's scale and zero."""
    monkeypatch.setattr(script, "DEVICE", torch.device("cpu"))
    layer = script.StackedLayer(MoE(experts=2, active=1, intermediate=256), 512, dtype, rows=3)
    groups = 3 * 256 * 512 // script.STACKED[dtype.removesuffix("_a8")][1]
    rows = 4 * (2 * 256 + 512) if dtype == "nvfp4" else 0
    assert layer.nbytes == 3 * 256 * 512 // 2 + scales * groups + rows
    assert layer.multiply(layer.inputs[0], layer.routings[0]).isfinite().all()
    found = list(layer.candidates(16, True))
    assert len(found) > 5 and all(script.stacked_shared(tile, 4, 1, True) <= SHARED for tile in found)


def test_drawn_blocks_have_scales(script, monkeypatch):
    monkeypatch.setattr(script, "DEVICE", torch.device("cpu"))
    layer = script.Layer(MoE(experts=2, active=1, intermediate=128), 256, "fp8_block", rows=3)
    assert layer.weights.up_scale.shape == (2, 2, 2) and layer.weights.down_scale.shape == (2, 2, 1)
    assert layer.multiply(layer.inputs[0], layer.routings[0]).isfinite().all()


def test_the_limit_counts_the_experts_that_are_touched(script):
    """16 MB of two experts at 4 TB/s; at 8192 rows the products take longer."""
    layer = script.Layer.__new__(script.Layer)
    layer.moe, layer.hidden, layer.rows = MoE(experts=4, active=1, intermediate=512), 4096, 8
    layer.weights = SimpleNamespace(up=torch.zeros(4, 1024, 4096), down=torch.zeros(4, 4096, 512))
    routing = Routing(torch.tensor([[1], [3], [3]], dtype=torch.int32), torch.ones(3, 1))
    layer.routings = [routing] * script.CALLS
    per_expert = 4 * (1024 * 4096 + 4096 * 512)
    assert layer.limit(4.0, 600) == pytest.approx(2 * per_expert / 4e6)
    layer.rows = 8192
    assert layer.limit(4.0, 600) == pytest.approx(8192 * 2 * per_expert / 4 / 600e6)
