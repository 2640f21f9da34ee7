"""Checkpoints with integer weights, in the layouts of compressed-tensors, AutoAWQ and GPTQ, on one and on two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import Collective
from dovetail.core.testing.model_driver import Alone, build_context
from dovetail.core.testing.rank_threads import on_threads
from dovetail.plugins.experts.config import TensorConfig, WholeConfig
from dovetail.plugins.experts.everywhere import TensorPlacement, WholePlacement
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama
from dovetail.plugins.quant.config import Int4Config
from dovetail.plugins.quant.int4.checkpoint import read_stored
from dovetail.plugins.quant.int4.quantizer import Int4

from ..layouts import Rounded, awq, compressed_tensors, gptq, pack_quantized, rounded
from .checkpoints import random_tokens, save_random
from .driver import Driver, load_model

TOKENS = random_tokens(40, seed=8)
Layout = tuple[dict[str, Any], dict[str, Any], Callable[[Rounded], dict[str, torch.Tensor]]]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
LAYOUTS: dict[str, Layout] = {
    "compressed-tensors": (
        pack_quantized(num_bits=4, strategy="group", group_size=32, symmetric=True),
        dict(bits=4, group=32, zeros=False),
        lambda m: compressed_tensors(m, 4, False),
    ),
    "compressed-tensors, zeros, order": (
        pack_quantized(num_bits=4, strategy="group", group_size=64, symmetric=False, actorder="group"),
        dict(bits=4, group=64, zeros=True, act_order=True),
        lambda m: compressed_tensors(m, 4, True, act_order=True),
    ),
    "8 bits, rows": (
        pack_quantized(num_bits=8, strategy="channel", symmetric=False),
        dict(bits=8, group=0, zeros=True),
        lambda m: compressed_tensors(m, 8, True),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
        dict(bits=4, group=64, zeros=True),
        awq,
    ),
    "gptq": (GPTQ, dict(bits=4, group=32, zeros=True), gptq),
    "gptq, 8 bits, order, v2": (
        {**GPTQ, "bits": 8, "desc_act": True, "checkpoint_format": "gptq_v2"},
        dict(bits=8, group=32, zeros=True, act_order=True),
        lambda m: gptq(m, 8, offset=0),
    ),
}


def quantize(folder: Path, layout: Layout, heads: tuple[str, ...] = ()) -> None:
    """Round the linear layers of a plain checkpoint; write it to `folder`/stored, and its values to `folder`/plain."""
    config, how, store = layout
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    stored, plain = dict(tensors), dict(tensors)
    for name in tensors:
        if name.endswith(("_proj.weight", "fc_in.weight", "fc_out.weight", *heads)):
            matrix = rounded(stored.pop(name), **how)
            plain[name] = matrix.weight()
            prefix = name.removesuffix("weight")
            found = {f"{prefix}{key}": value.contiguous() for key, value in store(matrix).items()}
            stored |= {key: value for key, value in found.items() if key not in tensors}
    hf = json.loads((folder / "config.json").read_text())
    for kind, content, more in (("stored", stored, {"quantization_config": config}), ("plain", plain, {})):
        (folder / kind).mkdir()
        save_file(content, folder / kind / "model.safetensors")
        (folder / kind / "config.json").write_text(json.dumps({**hf, **more}))


def load(folder: Path, **options: Any) -> Llama:
    quantizer, config = Int4(Int4Config()), LlamaConfig(path=str(folder))
    checkpoint = open_checkpoint(folder)
    quantizer.read_checkpoint(checkpoint)
    model = Llama(config, build_context(Llama.spec(config), quantizer=quantizer, **options))
    model.load(checkpoint.open())
    return model


def logits(model: Llama) -> torch.Tensor:
    return Driver(model).step([("a", TOKENS)])[0]


@pytest.mark.parametrize(
    ("layout", "variant"),
    [*((layout, "gqa") for layout in LAYOUTS), ("gptq", "biases"), ("compressed-tensors, zeros, order", "gptj")],
)
def test_values_of_the_checkpoint(layout, variant, tmp_path):
    """On one rank and on two: q and k of GPT-J have their rows reordered, kv heads and groups are divided."""
    save_random(tmp_path, variant, hidden_size=128)
    quantize(tmp_path, LAYOUTS[layout])
    expected = logits(load_model(tmp_path / "plain"))
    found = [logits(load(tmp_path / "stored"))]
    found += on_threads(2, lambda collective: logits(load(tmp_path / "stored", collective=collective)))
    for got in found:
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq"])
def test_logits_may_be_quantized(layout, tmp_path):
    """The file decides, not the config: checkpoints differ in whether they list lm_head."""
    save_random(tmp_path, "gqa", hidden_size=128)
    config, how, store = LAYOUTS[layout]
    quantize(tmp_path, (config, how, store), heads=("lm_head.weight",))
    model = load(tmp_path / "stored")
    assert type(model.head.table.method).__name__ == "StoredLinear"
    torch.testing.assert_close(logits(model), logits(load_model(tmp_path / "plain")), atol=2e-4, rtol=0)


ORDERED: Layout = ({**GPTQ, "desc_act": True}, dict(bits=4, group=32, zeros=True, act_order=True), gptq)
LATENTS = dict(q_lora_rank=32, kv_lora_rank=32, v_head_dim=16, qk_nope_head_dim=24)


@pytest.mark.parametrize(("variant", "changes", "shared"), [("glm4_moe", {}, 1), ("deepseek_v3", LATENTS, 0)])
def test_experts_with_act_order_are_stacked(variant, changes, shared, tmp_path):
    """A shared expert, too; but the channels of two, which are one matrix, are in any of its groups. On two ranks,
    whole experts are stacked, and those with some of the channels, which fill their groups up."""
    save_random(tmp_path, variant, hidden_size=128, moe_intermediate_size=64, **changes)
    quantize(tmp_path, ORDERED, heads=("kv_a_proj_with_mqa.weight",))
    expected, stored = logits(load_model(tmp_path / "plain")), tmp_path / "stored"
    model = load(stored)
    experts = model.blocks[-1].mlp.experts
    assert experts.method.stacked and experts.always == shared
    torch.testing.assert_close(logits(model), expected, atol=2e-4, rtol=0)

    def on_rank(ranks: Collective) -> list[tuple[bool, torch.Tensor]]:
        found = []
        for placement in (WholePlacement(WholeConfig()), TensorPlacement(TensorConfig())):
            placement.bind(ranks, 2 if isinstance(placement, WholePlacement) else 1)
            model = load(stored, collective=ranks, placement=placement)
            found.append((model.blocks[-1].mlp.experts.method.stacked, logits(model)))
        return found

    for found in on_threads(2, on_rank):
        assert [stacked for stacked, _ in found] == [True, True]
        for _, got in found:
            torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("groups", [1, 2])
def test_experts_with_act_order_may_move(groups, tmp_path):
    """Whole ones, and those of which a rank has some channels."""
    save_random(tmp_path, "qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    quantize(tmp_path, ORDERED)
    ranks, placement = Alone(None), WholePlacement(WholeConfig(rebalance=1))
    ranks.size = 2
    placement.bind(ranks, groups)
    (layer, *_) = load(tmp_path / "stored", collective=ranks, placement=placement).build.placed
    names = {name.split(".")[1] for name in layer.params}
    assert layer.method.stacked and names == {"codes", "scale", "zero", "order"}
    assert len(layer.stored(0)) == len(layer.params)


def test_it_is_chosen_and_generates(tmp_path):
    save_random(tmp_path, "gqa", hidden_size=128)
    quantize(tmp_path, LAYOUTS["awq"])
    texts = []
    for kind in ("stored", "plain"):
        llm = LLM(str(tmp_path / kind), overrides=["engine.device=cpu", "engine.kv_pages=64"])
        with llm:
            assert llm.composition.part("quant").name == {"stored": "int4", "plain": "none"}[kind]
            texts.append(llm.generate([(1, 2, 3, 4)], SamplingParams(max_tokens=12, temperature=0))[0].token_ids)
    assert texts[0] == texts[1]


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_generate_what_one_does(layout, tmp_path):
    save_random(tmp_path, "gqa", hidden_size=128)
    quantize(tmp_path, LAYOUTS[layout])
    texts = []
    for overrides in ([], ["engine.tp=2", "executor=multiproc"]):
        with LLM(str(tmp_path / "stored"), overrides=["engine.device=cpu", "engine.kv_pages=64", *overrides]) as llm:
            texts.append(llm.generate([TOKENS], SamplingParams(max_tokens=12, temperature=0))[0].token_ids)
    assert texts[0] == texts[1]


def test_a_file_beside_the_config_may_describe_it(tmp_path):
    """AutoGPTQ's first versions wrote quantize_config.json."""
    save_random(tmp_path, "gqa", hidden_size=128)
    quantize(tmp_path, LAYOUTS["gptq"])
    expected, config = logits(load(tmp_path / "stored")), tmp_path / "stored/config.json"
    hf = json.loads(config.read_text())
    method = {key: value for key, value in hf.pop("quantization_config").items() if key != "quant_method"}
    config.write_text(json.dumps(hf))
    (tmp_path / "stored/quantize_config.json").write_text(json.dumps(method))
    assert torch.equal(logits(load(tmp_path / "stored")), expected)
    assert compose(["model=llama", f"model.path={tmp_path}/stored"]).part("quant").name == "int4"


def changed(**values: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(LAYOUTS["compressed-tensors"][0]))
    config["config_groups"]["group_0"]["weights"] |= values
    return config


def transformed(location: str) -> dict[str, Any]:
    scheme = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": location}]}
    return {**LAYOUTS["compressed-tensors"][0], "transform_config": {"config_groups": {"R4": scheme}}}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (changed(num_bits=3), r"quantization_config\.weights\.num_bits is 3: there are 4, 8"),
        (changed(group_size=48), r"group_size is 48: there are 32, 64, 128"),
        (changed(strategy="block"), r"strategy is 'block'"),
        (changed(actorder="sometimes"), r"actorder is 'sometimes'"),
        (changed(num_bits=True), r"num_bits is True"),
        (transformed("input"), r"R4\.apply\.location is 'input': transforms of activations are not supported"),
        ({**GPTQ, "dynamic": {"-:x": {}}}, r"dynamic.*layers must have the same bits"),
        ({**GPTQ, "bits": 2}, r"bits is 2"),
        ({**GPTQ, "is_marlin_format": True}, r"is_marlin_format is True: tensors in the layout of the Marlin kernels"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, r"version is 'gemv'"),
        ({"quant_method": "gguf"}, r"quant=int4 reads compressed-tensors"),
        ([], r"it must be an object"),
    ],
)
def test_what_is_not_supported_is_an_error(config, says):
    with pytest.raises(ConfigError, match=says):
        read_stored({"quantization_config": config})


def test_transforms_of_weights_are_in_the_weights():
    assert read_stored({"quantization_config": transformed("weight_input")}) is not None


@pytest.mark.parametrize(
    ("layout", "name", "wrong", "says"),
    [
        ("gptq, 8 bits, order, v2", "g_idx", lambda t: t + 1, r"g_idx' has groups .*; there are \d+"),
        ("gptq, 8 bits, order, v2", "g_idx", lambda t: t * 0, r"g_idx' must have 32 inputs of each group"),
        ("gptq", "g_idx", lambda t: t.flip(0), r"g_idx' has group \d for input 0, which is in group 0 by config\.json"),
        ("gptq", "qweight", lambda t: t[:-1], r"qweight' has shape .* it must be"),
        ("gptq", "qzeros", lambda t: t.float(), r"qzeros' is float32 in the checkpoint; it must be int32"),
        ("gptq", "scales", lambda t: t * float("nan"), r"NaN|scales' has values that are not finite"),
        ("gptq", "bias", lambda t: t + 1, r"bias' has values that are not zero"),
        ("awq", "qzeros", None, r"1 missing \('model\.layers\.1\.mlp\.down_proj\.qzeros'\)"),
    ],
)  # fmt: skip
def test_a_damaged_tensor_is_named(layout, name, wrong, says, tmp_path):
    save_random(tmp_path, "gqa", hidden_size=128)
    quantize(tmp_path, LAYOUTS[layout])
    file, key = tmp_path / "stored/model.safetensors", f"model.layers.1.mlp.down_proj.{name}"
    tensors = load_file(file)
    tensors |= {} if wrong is None else {key: wrong(tensors[key]).contiguous()}
    if wrong is None:
        del tensors[key]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=says) as caught:
        load(tmp_path / "stored")
    assert "down" in str(caught.value)


def test_unlike_orders_of_merged_matrices_are_an_error(tmp_path):
    save_random(tmp_path, "gqa", hidden_size=128)
    quantize(tmp_path, LAYOUTS["gptq, 8 bits, order, v2"])
    file, key = tmp_path / "stored/model.safetensors", "model.layers.0.self_attn.k_proj.g_idx"
    tensors = load_file(file)
    save_file({**tensors, key: tensors[key].flip(0).contiguous()}, file)
    with pytest.raises(
        ConfigError, match=r"0\.self_attn\.q_proj\.g_idx' orders inputs unlike another matrix of layers\.0\.attn\.qkv"
    ):
        load(tmp_path / "stored")
