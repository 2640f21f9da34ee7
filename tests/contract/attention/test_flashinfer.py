"""attention=flashinfer with a stand-in for its package: checks what it passes, from pages and lengths to scales."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dovetail.core import host as engine_host
from dovetail.core.compose import Host, compose
from dovetail.core.engine.engine import start_engine
from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import AttentionBackend, AttentionLayer, HostBounds
from dovetail.core.testing.attention import AttentionContract
from dovetail.plugins.attention.config import FlashInferConfig
from dovetail.plugins.attention.flashinfer import backend, capabilities
from dovetail.plugins.attention.flashinfer.backend import FlashInfer

HOPPER = Host(device="cuda", device_count=1, compute_capability=(9, 0))


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("flashinfer", Path(__file__).with_name("fake_flashinfer.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(torch.cuda, "Event", module.Event)
    return module


class TestFlashInfer(AttentionContract):
    dtype = torch.bfloat16
    kv_dtypes = (torch.float8_e4m3fn, torch.float8_e5m2)
    head_dims = (64, 128)
    tree = False

    def make(self) -> AttentionBackend:
        return FlashInfer(FlashInferConfig(workspace_mib=16))

    def test_a_step_is_planned_once_for_layers_of_one_shape(self, fake: ModuleType) -> None:
        arena = self._arena(windows=(0, 6))
        arena.run(arena.plan([("a", 9), ("b", 6)]))
        before = fake.Event.begun
        arena.run(arena.plan([("b", 1), ("a", 1), ("c", 7)], num_decode=2))
        assert fake.Event.begun - before == 4, "two kernels, two groups of two layers each"

    def test_single_tokens_and_longer_rows_go_to_kernels_of_their_own(self) -> None:
        arena = self._arena()
        arena.run(arena.plan([("a", 9), ("b", 6)]))
        for counts, num_decode, kernels in (
            ([1, 1, 7], 2, [True, False]),
            ([1, 1], 2, [True]),
            ([3, 1], 2, [False]),
            ([3, 1, 7], 2, [False]),
            ([1, 1], 0, [False]),
        ):
            step = arena.plan(list(zip("abc", counts, strict=False)), num_decode=num_decode)
            assert [rows.decode for rows in step.ctxs[0].state] == kernels
            arena.run(step)

    def test_rows_that_are_split_find_room_whatever_the_heads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """71 query heads on one kv head: FlashInfer would fail in the first step that splits a row."""
        monkeypatch.setattr(backend, "_processors", lambda device: 132)
        attention, tiles = self.make(), 2 * 132
        layer = AttentionLayer(0, 0, 0, heads=71, kv_heads=1, head_dim=64, scale=0.125)
        wrapper = attention._wrapper(True, layer, torch.device("cpu"))
        assert wrapper.workspace.numel() >= 71 * tiles * 128 * (64 + 1) * 4

    def test_what_it_has_no_kernel_for_is_refused(self) -> None:
        for dtype, kv_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float16)):
            suite = type(self)()
            suite.dtype = dtype
            arena = suite._arena(kv_dtype=kv_dtype)
            with pytest.raises(CapabilityError, match="Would work: engine.dtype=bfloat16"):
                arena.run(arena.plan([("a", 9)]))


def facts(**changed: object) -> dict[str, object]:
    return {"head_dim": 128, "experts": False, "compressed_kv": False, "windowed": True, **changed}


def test_it_fits_a_gpu_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "find_spec", lambda name: name)
    composition = compose(["attention=flashinfer", "engine.dtype=bfloat16"])
    composition.check(HOPPER, facts())
    with pytest.raises(CapabilityError) as caught:
        composition.check(HOPPER, facts(head_dim=80))
    assert "head_dim 64 or 128 or 256" in str(caught.value) and "attention=triton" in str(caught.value)
    with pytest.raises(CapabilityError, match="pages have the queries' dtype or 8 bits"):
        compose(["attention=flashinfer", "engine.kv_dtype=float16"]).check(HOPPER, facts())


def test_without_its_package_or_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "find_spec", lambda name: None)
    with pytest.raises(CapabilityError) as caught:
        compose(["attention=flashinfer"]).check(Host(), facts())
    package, device = caught.value.conflicts
    assert "lacks the package flashinfer-python: pip install 'dovetail[flashinfer]'. Would work: attention=" in package
    assert "requires host with device cuda" in device


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["spec_decode=ngram", "engine.depth=2"], True),
        (["spec_decode=ngram", "engine.depth=1"], False),
        (["spec_decode=none", "engine.depth=2"], False),
    ],
)
def test_drafts_in_flight_are_refused(options: list[str], refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer plans from exact lengths on the host."""
    monkeypatch.setattr(capabilities, "find_spec", lambda name: name)
    monkeypatch.setattr(engine_host, "detect_host", lambda device: HOPPER)
    monkeypatch.setattr(engine_host, "model_facts", lambda spec: facts())

    class Started(Exception):
        pass

    def stop(*args: object) -> None:
        raise Started

    monkeypatch.setattr("dovetail.core.engine.checks.check_weights_fit", stop)
    with pytest.raises(CapabilityError if refused else Started) as caught:
        start_engine(compose(["attention=flashinfer", *options]))
    if refused:
        assert "spec_decode=ngram, engine.depth=2). Would work: engine.depth=1, spec_decode=none." in str(caught.value)


def test_bounds_alone_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer")
    assert FlashInfer(FlashInferConfig()).plan_host(HostBounds((1,), (9,), 1)) is None
