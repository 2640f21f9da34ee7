"""Checkpoints whose matrix of logits is quantized: the tensors of the file decide."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.compose import installed
from dovetail.core.errors import ConfigError
from dovetail.core.layouts.words import pack_nibbles
from dovetail.core.ops.weight_formats import E2M1, NF4
from dovetail.core.testing.model_driver import build_context
from dovetail.core.testing.rank_threads import on_threads
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama
from dovetail.plugins.quant.fp4.rounding import round_to_fp4
from dovetail.plugins.quant.int8.format import quantize_rows
from dovetail.plugins.quant.nf4.quantizer import round_to_nf4

from ..layouts import bitsandbytes
from .checkpoints import random_tokens, save_random
from .driver import Driver, load_model

TOKENS = random_tokens(20, seed=8)
Tensors = dict[str, torch.Tensor]


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    inputs = {**weights, "strategy": "token", "dynamic": True} if form == "int-quantized" else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["re:.*_proj"],
    }


def nvfp4(weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scale_OG, _, row_scale_O = round_to_fp4(weight_OI, 16, nvfp4=True)
    stored = {
        "weight_packed": pack_nibbles(codes),
        "weight_scale": scale_OG,
        "weight_global_scale": 1 / row_scale_O[:1],
    }
    scale = scale_OG.float().repeat_interleave(16, 1) * row_scale_O[:, None]
    return stored, E2M1.reference(codes) * scale


def nf4(weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scale_OG = round_to_nf4(weight_OI, 64)
    return bitsandbytes(weight_OI, nested=False), NF4.reference(codes) * scale_OG.repeat_interleave(64, 1)


def int8(weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    values, scale_O1 = quantize_rows(weight_OI)
    return {"weight": values, "weight_scale": scale_O1}, values * scale_O1


NF4_CONFIG = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "llm_int8_skip_modules": ["_proj"],
}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]], float]] = {
    "fp4": (compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), nvfp4, 1e-5),
    "nf4": (NF4_CONFIG, nf4, 1e-5),
    # Inputs are rounded to 8 bits, too.
    "int8": (compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8, 0.02),
}
"""Quantizer -> (quantization_config, function that returns stored tensors and their values, relative error)."""


def load(folder: Path, quant: str, options: dict[str, Any] | None = None, **context: Any) -> Llama:
    registered, config = installed().get("quant", quant), LlamaConfig(path=str(folder))
    quantizer = registered.target()(registered.component.config(**(options or {})))
    checkpoint = open_checkpoint(folder)
    quantizer.read_checkpoint(checkpoint)
    model = Llama(config, build_context(Llama.spec(config), quantizer=quantizer, **context))
    model.load(checkpoint.open())
    return model


def logits(model: Llama) -> torch.Tensor:
    return Driver(model).step([("a", TOKENS)])[0]


@pytest.mark.parametrize("variant", ["gqa", "tied"])
@pytest.mark.parametrize("quant", FORMATS)
def test_logits_are_those_of_the_stored_values(quant, variant, tmp_path):
    """With one rank and with two. A tied matrix is also the embedding."""
    config, store, error = FORMATS[quant]
    save_random(tmp_path, variant, hidden_size=128, vocab_size=208)
    name = "lm_head.weight" if variant == "gqa" else "model.embed_tokens.weight"
    tensors = {key: each for file in tmp_path.glob("*.safetensors") for key, each in load_file(file).items()}
    stored, values = store(tensors.pop(name))
    hf = json.loads((tmp_path / "config.json").read_text())
    prefix = name.removesuffix("weight")
    for kind, more, extra in (
        ("stored", {f"{prefix}{key}": each for key, each in stored.items()}, {"quantization_config": config}),
        ("plain", {name: values}, {}),
    ):
        (tmp_path / kind).mkdir()
        save_file(
            {key: x.contiguous() for key, x in {**tensors, **more}.items()}, tmp_path / kind / "model.safetensors"
        )
        (tmp_path / kind / "config.json").write_text(json.dumps({**hf, **extra}))
    expected = logits(load_model(tmp_path / "plain"))
    found = [logits(load(tmp_path / "stored", quant))]
    found += on_threads(2, lambda collective: logits(load(tmp_path / "stored", quant, collective=collective)))
    for got in found:
        assert (got - expected).norm() < error * expected.norm()
    if quant != "int8":
        with pytest.raises(ConfigError, match=r"quant\.head=fp8: the checkpoint has quantized logits"):
            load(tmp_path / "stored", quant, {"head": "fp8"})
