"""Adapter folders that are accepted, and errors for the others. The folder is untrusted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.core.compose import compose
from dovetail.core.engine.checks import check_fit
from dovetail.core.errors import RequestError
from dovetail.core.interfaces import LinearShape
from dovetail.plugins.adapter.config import LoRAConfig
from dovetail.plugins.adapter.lora.adapters import LoRA
from dovetail.plugins.adapter.lora.peft import open_adapter

NAME = "model.layers.0.self_attn.q_proj"
A, B = (f"base_model.model.{NAME}.lora_{factor}.weight" for factor in "AB")


def tensors(rank: int = 4, outputs: int = 6, inputs: int = 10) -> dict[str, torch.Tensor]:
    return {A: torch.ones(rank, inputs), B: torch.ones(outputs, rank)}


def save(folder: Path, given: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    import json

    from safetensors.torch import save_file

    stated = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    save_file(tensors() if given is None else given, folder / "adapter_model.safetensors")
    return folder


class Site:
    """A layer of one matrix."""

    whole = ((6, 10),)
    shape = LinearShape(10, 6, (6,), names=(NAME,))

    def output_share(self, part: int, tensor: Any) -> torch.Tensor:
        return tensor[:]

    def input_share(self, tensor: Any) -> torch.Tensor:
        return tensor[:]


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 8 / math.sqrt(4)),
        ({"r": 16, "rank_pattern": {"layers.0.self_attn.q_proj": 4}}, 2.0),
        ({"alpha_pattern": {"other": 1, "q_proj": 6, NAME: 9}}, 1.5),
        ({"target_modules": ".*q_proj|v_proj"}, 2.0),
        ({"init_lora_weights": "gaussian", "use_dora": False, "modules_to_save": None, "lora_dropout": 0.1}, 2.0),
    ],
)
def test_scale(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    (factors,) = open_adapter(save(tmp_path, **config)).values()
    assert (factors.rank, factors.scale) == (4, pytest.approx(scale))


def test_a_name_from_the_file_is_escaped_and_shortened(tmp_path: Path) -> None:
    evil = "base_model.model.\x1b[2J" + "x" * 100_000 + ".lora_A.weight"
    with pytest.raises(
        RequestError, match=r"tensor 'base_model.model.\\x1b\[2Jxx.*lora_A.weight' is not part"
    ) as error:
        open_adapter(save(tmp_path, {evil: torch.ones(4, 10)}))
    assert str(error.value).isprintable() and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"use_dora": True}, "use_dora=True.*DoRA"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.w1"]}, "target_parameters"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"alora_invocation_tokens": [3]}, "aLoRA"),
        ({"init_lora_weights": "pissa_niter_16"}, "pissa.*path_initial_model_for_weight_conversion"),
        ({"r": 8}, "rank 4 in adapter_model.safetensors and 8 in"),
        ({"r": "many"}, "r of .* is 'many'"),
        ({"lora_alpha": True}, "lora_alpha of .* is True"),
        ({"lora_alpha": -1}, "lora_alpha of .* is -1"),
        ({"lora_alpha": float("inf")}, "lora_alpha of .* is inf"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is not an object"),
        ({"rank_pattern": {"(a+)+b": 4}}, "is a pattern"),
        ({"target_modules": ["q_proj", "v_proj"]}, "no tensor for 'v_proj'"),
        ({"filler": "x" * (1 << 20)}, "bytes; the limit is"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configs_that_are_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=words):
        open_adapter(save(tmp_path, **config))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "has no tensors"),
        ({A: torch.ones(4, 10)}, "lora_A without its other factor"),
        ({A: torch.ones(4, 10), B: torch.ones(6, 5)}, "do not fit"),
        ({A: torch.ones(4), B: torch.ones(6, 4)}, "do not fit"),
        (tensors() | {A.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(6)}, "'base_model.*magnitude"),
        (tensors() | {"base_model.model.lm_head.weight": torch.ones(2)}, "lm_head.weight' is not part of a LoRA"),
        (tensors() | {A.replace("_A.weight", "_embedding_A"): torch.ones(2)}, "is not part of a LoRA"),
    ],
    ids=["nothing", "half", "ranks", "vector", "magnitude", "whole layer", "embedding"],
)
def test_tensors_that_are_refused(given: dict[str, torch.Tensor], words: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=words):
        open_adapter(save(tmp_path, given))


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="has no adapter_config.json"):
        open_adapter(tmp_path)
    save(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(RequestError, match="cannot be read as safetensors"):
        open_adapter(tmp_path)
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(RequestError, match="pickled weights would run code"):
        open_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[1]")
    with pytest.raises(RequestError, match="not an object"):
        open_adapter(tmp_path)


@pytest.mark.parametrize(
    ("given", "config", "words"),
    [
        (tensors(rank=32), {"r": 32}, r"rank 32.*at most 16 \(adapter\.max_rank"),
        (tensors(outputs=8), {}, "10 inputs to 8 outputs, and this model's maps 10 to 6: .*another base model"),
        (tensors(inputs=12), {}, "12 inputs to 6 outputs"),
        (tensors() | {B: torch.full((6, 4), float("nan"))}, {}, f"{NAME} has numbers that are not finite"),
        (tensors() | {B: torch.full((6, 4), 1e38)}, {"lora_alpha": 1e3}, f"{NAME} has numbers that are not finite"),
        ({name.replace("q_proj", "lm_head"): t for name, t in tensors().items()}, {"target_modules": "all-linear"},
         "no linear layer 'model.layers.0.self_attn.lm_head' to adapt; it has q_proj"),
    ],
    ids=["rank", "outputs", "inputs", "nan", "overflow", "unknown"],
)  # fmt: skip
def test_what_does_not_fit_the_model(given: Any, config: dict[str, Any], words: str, tmp_path: Path) -> None:
    lora = LoRA(LoRAConfig(slots=1), torch.device("cpu"), torch.float32)
    lora.attach(Site())
    lora.allocate()
    with pytest.raises(RequestError, match=words):
        lora.read("a@1", save(tmp_path, given, **config))


def test_adapters_of_experts_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """The names of their tensors suffice."""
    name = "model.layers.1.mlp.experts.3.gate_proj"
    routed = {
        f"base_model.model.{name}.lora_{factor}.weight": x for factor, x in zip("AB", tensors().values(), strict=True)
    }
    save(tmp_path, routed | tensors())
    words = ["engine.device=cpu", "adapter=lora", f"+adapter.load.a='{tmp_path}'"]
    with pytest.raises(RequestError, match=f"adapter: .*changes '{name}', and routed experts take no adapters"):
        check_fit(compose([*words, "model=small_moe"], app="generate"))
    save(tmp_path)
    check_fit(compose([*words, "model=small_moe"], app="generate"))
