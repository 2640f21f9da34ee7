"""Plans of quantized checkpoints have the formats of the file, read from its headers without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dovetail.core.compose import Host, compose
from dovetail.core.engine.checks import check_weights_fit, quantizers
from dovetail.core.engine.cost import bind_cost, formats
from dovetail.core.errors import CapacityError
from dovetail.core.interfaces.cost import RowWork
from dovetail.core.layouts.words import pack_words

from ...contract.checkpoint.gguf_files import SMALL, byte_tokenizer, small_tensors, write_gguf
from ...layouts import bitsandbytes, pack_quantized
from ..worker.test_bad_checkpoints import FP8, GPTQ, LAYOUTS, NF4
from .test_plan import CODE, ROOT

CONFIG = {**SMALL, "intermediate_size": 128, "torch_dtype": "bfloat16"}
TYPES = {
    "lm_head": "Q8_0",
    "embed_tokens": "Q4_0",
    "mlp.down_proj": "Q8_0",
    "mlp.up_proj": "Q4_0",
    "mlp.gate_proj": "Q4_0",
}
PACKED = pack_quantized(num_bits=8, strategy="channel", symmetric=True)
GROUPS = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "a": {**FP8["config_groups"]["group_0"], "targets": ["Linear"], "format": "float-quantized"},
        "b": {**PACKED["config_groups"]["group_0"], "targets": ["re:.*down_proj"], "format": "pack-quantized"},
    },
    "ignore": ["lm_head"],
}
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
CHANNELS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT8 = {"targets": ["Linear"], "format": "int-quantized", "weights": CHANNELS, "input_activations": TOKENS}
MOST_IN_INT8 = {
    **GROUPS,
    "config_groups": {"a": INT8, "b": {**GROUPS["config_groups"]["a"], "targets": ["re:.*o_proj"]}},
}
ALONE = {"group_0": {**FP8["config_groups"]["group_0"], "input_activations": None}}
NAIVE = {**FP8, "format": "naive-quantized", "config_groups": ALONE}


def packed(weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    codes = torch.zeros(weight_OI.shape, dtype=torch.uint8)
    return {"weight_packed": pack_words(codes, 8, 1), "weight_scale": torch.ones(len(codes), 1)}


def mixed(name: str, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    return packed(weight_OI) if "down_proj" in name else LAYOUTS["fp8"][1](weight_OI)


def most_in_int8(name: str, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    if "o_proj" in name:
        return LAYOUTS["fp8"][1](weight_OI)
    return {"weight": torch.zeros(weight_OI.shape, dtype=torch.int8), "weight_scale": torch.ones(len(weight_OI), 1)}


STORE = {
    "fp8": (FP8, lambda name, w: LAYOUTS["fp8"][1](w)),
    "naive": (NAIVE, lambda name, w: LAYOUTS["fp8"][1](w)),
    "gptq": ({**GPTQ, "desc_act": False}, lambda name, w: LAYOUTS["gptq"][1](w)),
    "nf4": ({**NF4, "llm_int8_skip_modules": ["down_proj"]}, lambda name, w: skipped(name, w)),
    "packed": (PACKED, lambda name, w: packed(w)),
    "groups": (GROUPS, mixed),
    "int8": (MOST_IN_INT8, most_in_int8),
}


def skipped(name: str, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight": weight_OI} if "down_proj" in name else bitsandbytes(weight_OI, nested=True)


def save(folder: Path, layout: str, head: bool = False) -> None:
    """Write a checkpoint; `head`: also the matrix of logits is quantized."""
    config, store = STORE[layout]
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in small_tensors(CONFIG).items():
        prefix = name.removesuffix("weight")
        found = store(name, tensor) if "_proj." in name or (head and "lm_head" in name) else {"weight": tensor}
        tensors |= {f"{prefix}{key}": value.contiguous() for key, value in found.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": config}))


def stated(path: Path, *overrides: str) -> tuple[float, str]:
    composition = compose(["app=plan", "model=llama", f"model.path={path}", *overrides])
    spec = composition.part("model").facts()
    found = formats(composition, spec, "cuda")
    assert quantizers(composition, Host(device="cuda")) == [], "a quantized checkpoint takes no other quantizer"
    return found.weight_bits, found.product


WEIGHTS = {"q": 64 * 64, "kv": 2 * 32 * 64, "o": 64 * 64, "gate_up": 2 * 128 * 64, "down": 64 * 128}
TOTAL = sum(WEIGHTS.values())


@pytest.mark.parametrize(
    ("layout", "bits", "product"),
    [
        ("fp8", 8, "fp8"),
        ("naive", 8, "bfloat16"),
        ("gptq", 4 + 24 / 32, "bfloat16"),
        ("packed", 8, "bfloat16"),
        ("nf4", (4.5 * (TOTAL - WEIGHTS["down"]) + 16 * WEIGHTS["down"]) / TOTAL, "bfloat16"),
        ("groups", 8, "fp8"),
        ("int8", 8, "int8"),
    ],
)
def test_formats_come_from_the_file(layout, bits, product, tmp_path):
    save(tmp_path, layout)
    assert stated(tmp_path) == (pytest.approx(bits), product)


@pytest.mark.parametrize(
    ("layout", "option", "product"),
    [
        ("naive", "fp8", "fp8"),
        ("fp8", "model", "bfloat16"),
        ("groups", "model", "bfloat16"),
        ("int8", "fp8", "int8"),
        ("int8", "model", "int8"),
    ],
)
def test_an_option_sets_the_format_of_matmuls(layout, option, product, tmp_path):
    """Groups in int8 do not have the option, and most matmuls of that checkpoint are theirs."""
    save(tmp_path, layout)
    assert stated(tmp_path, f"quant.activations={option}")[1] == product


def test_a_drafters_weights_come_from_its_file(tmp_path):
    """Also where quant@spec_decode.quant is not given."""
    save(tmp_path, "nf4")
    words = ["spec_decode=draft_model", "model@spec_decode.model=llama", f"spec_decode.model.path={tmp_path}"]
    drafter = compose(["app=plan", *words]).part("spec_decode")
    assert drafter.config.quant.name == "nf4"
    found = drafter.facts()
    assert found.weight_bits == pytest.approx((4.5 * (TOTAL - WEIGHTS["down"]) + 16 * WEIGHTS["down"]) / TOTAL)
    assert found.head_bits is None and found.embedding_bits is None


@pytest.mark.parametrize("words", [["quant=w4a8"], ["quant=gguf"], ["quant=mixed", "quant@quant.rest=int4"]])
def test_matmuls_of_many_rows_that_decode_are_stated(words):
    for option, rounds in (("rounded", True), ("exact", False)):
        made = compose(["app=plan", "model=llama3_8b", *words, f"quant.many_rows={option}"])
        assert formats(made, made.part("model").facts(), "cuda").rounds is rounds


@pytest.mark.parametrize(
    ("words", "copies"),
    [(["quant=w4a8"], 8), (["quant=w4a16"], 0), (["quant=gguf", "quant.activations=fp8"], 8), (["quant=gguf"], 0)],
)
def test_kept_weights_take_memory_and_no_time(words, copies):
    found = []
    for option in ("rounded", "kept"):
        made = compose(["app=plan", "model=llama3_8b", "cost=h200", *words, f"quant.many_rows={option}"])
        cost = bind_cost(made, made.part("model").facts(), "cuda")
        found.append((cost.weight_bytes(), cost.step_weight_bytes(), cost.step_seconds([RowWork(8192, 8192)])))
    (memory, read, seconds), (more_memory, same_read, fewer_seconds) = found
    p = made.part("model").facts().parameters
    assert more_memory - memory == pytest.approx((p.attention + p.mlp) * copies / 8)
    assert same_read == read and (fewer_seconds < seconds if copies else fewer_seconds == seconds)


@pytest.mark.parametrize("layout", ["gptq", "nf4", "groups"])
@pytest.mark.parametrize("option", ["rounded", "kept"])
def test_the_check_of_memory_counts_the_bytes_of_the_plan(layout, option, tmp_path):
    save(tmp_path, layout)
    words = ["quant.activations=fp8", *([] if layout == "groups" else [f"quant.many_rows={option}"])]
    words += ["cost=h200", "model=llama", f"model.path={tmp_path}", "engine.memory_fraction=0.5"]
    made = compose(["app=plan", *words])
    spec = made.part("model").facts()
    with pytest.raises(CapacityError) as caught:
        check_weights_fit(made, spec, Host(device="cuda", device_count=1, compute_capability=(9, 0), memory_bytes=1000))
    assert caught.value.missing_bytes == int(bind_cost(made, spec, "cuda").weight_bytes() - 500)


def test_a_quantized_head_is_counted(tmp_path):
    save(tmp_path, "packed", head=True)
    composition = compose(["app=plan", "model=llama", f"model.path={tmp_path}"])
    found = formats(composition, composition.part("model").facts(), "cuda")
    assert found.head_bits == 8 and found.embedding_bits is None
    rounded = compose(["app=plan", "model=llama3_8b", "quant=w4a8"])
    spec = rounded.part("model").facts()
    found, plain = (formats(one, spec, "cuda") for one in (rounded, compose([*rounded.overrides, "quant.head=plain"])))
    assert found.head_product == "fp8" and plain.head_product is None
    assert plain.weight_bytes(spec.parameters) - found.weight_bytes(spec.parameters) == 128_256 * 4096


def test_a_gguf_file_with_several_types_is_planned_without_torch(tmp_path):
    path = tmp_path / "x.gguf"
    types = {name: kind for name in small_tensors(CONFIG) for part, kind in TYPES.items() if part in name}
    write_gguf(path, CONFIG, None, byte_tokenizer(), types)
    command = ["app=plan", "plan.format=json", "model=llama", f"model.path={path}", "cost=h200"]
    argv = [sys.executable, "-c", CODE, *command]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    attention = TOTAL - WEIGHTS["gate_up"] - WEIGHTS["down"]
    bits = (4.5 * WEIGHTS["gate_up"] + 8.5 * WEIGHTS["down"] + 16 * attention) / TOTAL
    assert found["formats"]["weights_bits"] == pytest.approx(bits)
    tables = (4.5 + 8.5) * CONFIG["vocab_size"] * 64
    norms = 3 * 64 * 16
    assert found["bytes_per_gpu"]["weights"] == pytest.approx((bits * TOTAL + tables + norms) / 8)
