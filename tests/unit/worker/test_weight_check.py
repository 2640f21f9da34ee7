"""Weights that are not finite are rejected while a rank loads them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.core.checkpoint import FolderCheckpoint, locate
from dovetail.core.errors import ConfigError
from dovetail.core.testing.executor_scripts import quiet, small_composition
from dovetail.core.worker import loader
from dovetail.core.worker.loader import load_rank
from dovetail.core.worker.weight_check import WeightCheck

TINY = locate("pkg://dovetail.plugins.model.bundled/tiny")
NAME = "model.layers.1.mlp.down_proj.weight"
CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.bfloat16, index: Any = slice(None)) -> None:
    check = WeightCheck(CPU, dtype)
    checkpoint = FolderCheckpoint(folder)
    for name, opener in checkpoint.open():
        lazy = check.watch(name, opener)()
        assert lazy.get_shape()
        assert lazy[index].device == CPU
    check.finish(checkpoint)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_a_value_that_is_not_finite_is_found(dtype: torch.dtype, bad: float, tmp_path: Path) -> None:
    tensor = torch.full((3, 70), -1.0)
    tensor[2, 67] = bad
    save_file({"fine": torch.ones(4), "x\n.weight": tensor.to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"/model.safetensors: tensor 'x\\n.weight' has values that are NaN or inf"):
        load(tmp_path)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_in_fp8_weights(code: int, tmp_path: Path) -> None:
    codes = torch.arange(2**24 + 3, dtype=torch.int32).remainder(127).to(torch.uint8).unsqueeze(1)
    save_file({"w.weight": codes.view(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    load(tmp_path)
    codes[-1] = code
    save_file({"w.weight": codes.view(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="'w.weight' has values that are NaN"):
        load(tmp_path)


def test_the_largest_finite_values_pass(tmp_path: Path) -> None:
    """Their sum overflows."""
    tensors = {f"{dtype}": torch.full((64, 64), torch.finfo(dtype).max, dtype=dtype) for dtype in (torch.bfloat16,)}
    tensors |= {"codes": torch.full((4,), 255, dtype=torch.uint8), "empty": torch.ones(1, 0), "zero": torch.zeros(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path)


def test_values_that_overflow_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    save_file({"a.weight": torch.tensor([1e5]), "a.weight_scale": torch.tensor([1e5])}, tmp_path / "model.safetensors")
    load(tmp_path)
    with pytest.raises(ConfigError, match="'a.weight' has values up to 100000, .* in torch.float16. Set engine.dtype"):
        load(tmp_path, torch.float16)


def test_only_what_the_rank_reads_counts(tmp_path: Path) -> None:
    save_file({"a.weight": torch.tensor([1.0, math.nan])}, tmp_path / "model.safetensors")
    load(tmp_path, index=slice(0, 1))


def test_the_shard_is_named(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({name: torch.tensor([math.nan]) for name in ("b.weight", "c.weight")}, tmp_path / "two.safetensors")
    weight_map = {"a.weight": "one.safetensors", "b.weight": "two.safetensors", "c.weight": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"/two.safetensors: tensor 'b.weight' .*\(1 other tensors have such values"):
        load(tmp_path)


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_a_rank_does_not_start_with_such_weights(quant: str, tmp_path: Path) -> None:
    for file in TINY.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_text(file.read_text())
    tensors = load_file(TINY / "model.safetensors")
    tensors[NAME][5, 3] = math.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"tensor '{NAME}' has values that are NaN"):
        load_rank(
            small_composition(f"quant={quant}", "model.load=auto", "model.hf=null", f"model.path={tmp_path}"), quiet
        )


def test_a_truncated_file_is_refused_before_a_device_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in TINY.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[:-1000] if file.suffix == ".safetensors" else content)
    monkeypatch.setattr(loader, "resolve_device", lambda *_: pytest.fail("a device is used"))
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read as safetensors"):
        load_rank(small_composition("model.load=auto", "model.hf=null", f"model.path={tmp_path}"), quiet)
