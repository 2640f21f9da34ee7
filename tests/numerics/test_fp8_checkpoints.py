"""Checkpoints that are already in FP8, in the layouts of compressed-tensors and AutoFP8."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import LLM
from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.errors import ConfigError
from dovetail.core.testing.checkpoint import MemoryCheckpoint
from dovetail.core.testing.model_driver import build_context
from dovetail.core.testing.rank_threads import on_threads
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama
from dovetail.plugins.quant.config import FP8Config, NoneConfig
from dovetail.plugins.quant.fp8.checkpoint import read_stored
from dovetail.plugins.quant.fp8.format import E4M3, LARGEST, quantize_blocks, quantize_rows
from dovetail.plugins.quant.fp8.quantizer import FP8
from dovetail.plugins.quant.none import Unquantized

from .checkpoints import in_blocks, random_tokens, save_random
from .driver import Driver

TOKENS = random_tokens(60, seed=8)
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def quantize(folder: Path, config: dict, *, tensor: bool = False, kept: tuple[str, ...] = (), extra=None) -> None:
    """Rewrite a plain checkpoint in place: linear layers in E4M3, with scales per row or per tensor."""
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    for name in [
        n
        for n in tensors
        if n.endswith(("_proj.weight", "fc_in.weight", "fc_out.weight")) and not n.startswith(kept or ("-",))
    ]:
        weight = tensors[name]
        if tensor:
            scale = weight.abs().max() / LARGEST
            tensors[name], tensors[f"{name}_scale"] = (weight / scale).to(E4M3), scale
        else:
            tensors[name], tensors[f"{name}_scale"] = quantize_rows(weight)
        if config.get("activation_scheme") == "static":
            tensors[name.replace("weight", "input_scale")] = torch.tensor(0.02)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file({**tensors, **(extra or {})}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))


def load(folder: Path, quantizer=None, kv_dtype: torch.dtype = torch.float32, collective=None, **options) -> Llama:
    quantizer, config = quantizer or FP8(FP8Config()), LlamaConfig(path=str(folder), **options)
    spec = Llama.spec(config)
    checkpoint = open_checkpoint(folder)
    quantizer.read_checkpoint(checkpoint)
    model = Llama(config, replace(build_context(spec, quantizer=quantizer, collective=collective), kv_dtype=kv_dtype))
    model.load(checkpoint.open())
    return model


def logits(folder: Path, quantizer=None, collective=None) -> torch.Tensor:
    return Driver(load(folder, quantizer, collective=collective)).step([("a", TOKENS)])[0]


@pytest.mark.parametrize("variant", ["gqa", "biases", "gptj"])
def test_rows_as_we_would_have_quantized_them(variant, tmp_path):
    """Offline quantization and quantization while loading give the same numbers, also for reordered rows."""
    save_random(tmp_path, variant, hidden_size=128)
    expected = logits(tmp_path)
    quantize(tmp_path, CHANNEL)
    assert torch.equal(logits(tmp_path), expected)


def test_one_scale_a_matrix_and_static_inputs(tmp_path):
    """Merged parts keep separate scales; q, k and v differ greatly in magnitude here."""
    save_random(tmp_path, "gqa", hidden_size=128)
    plain = logits(tmp_path, Unquantized(NoneConfig()))
    on_the_fly = logits(tmp_path)
    quantize(tmp_path, STATIC, tensor=True)
    got = logits(tmp_path)
    assert not torch.equal(got, on_the_fly)
    assert (got - plain).norm() < 1.5 * (on_the_fly - plain).norm()


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        (["lm_head", "model.layers.0.mlp.gate"], ()),
        (["gate"], ()),
        (["mlp.gate.", "model.layers.1."], ("model.layers.1.",)),
        (["model.layers.1"], ("model.layers.1.",)),
        (["self_attn"], tuple(f"model.layers.{layer}.self_attn" for layer in range(11))),
        (["model.layers.*.self_attn"], tuple(f"model.layers.{layer}.self_attn" for layer in range(11))),
        (["o_proj", "model.(layers"], tuple(f"model.layers.{layer}.self_attn.o" for layer in range(11))),
    ],
)
def test_modules_to_not_convert_are_those_of_transformers(entries, kept, tmp_path):
    """Whole words of a name: gate is not gate_proj, and layer 1 not layer 10."""
    save_random(tmp_path, "gqa", num_hidden_layers=11)
    matrices = [n for file in tmp_path.glob("*.safetensors") for n in load_file(file) if n.endswith("_proj.weight")]
    names = [name.removesuffix(".weight") for name in matrices if name.startswith(kept or "-")]
    stated = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    quantize(tmp_path, {**stated, "ignored_layers": names}, tensor=True, kept=kept)
    expected = logits(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {**stated, "modules_to_not_convert": entries}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(tmp_path), expected)
    # A key that is null is as good as none.
    config["quantization_config"]["ignored_layers"] = None
    assert read_stored(config).ignored == tuple(entries)


MATRICES = ("_proj.weight", "_mqa.weight", "fc_in.weight", "fc_out.weight")
BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [64, 128],
    "modules_to_not_convert": ["lm_head"],
}


@pytest.mark.parametrize("variant", ["gqa", "gptj", "deepseek_v3"])
def test_scales_of_blocks(variant, tmp_path):
    """On one rank and on two, whose channels begin inside blocks. Rows that are reordered keep their scales. The
    compressed matrix of DeepSeek has one and a half blocks of rows."""
    latents = {"kv_lora_rank": 88, "num_hidden_layers": 2} if variant == "deepseek_v3" else {}
    save_random(tmp_path, variant, hidden_size=192, **latents)
    plain = {name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    stored = dict(plain)
    for name in [n for n in plain if n.endswith(MATRICES)]:
        stored[name], stored[f"{name}_scale_inv"], plain[name] = in_blocks(plain[name])
    quantize(tmp_path, BLOCKS, kept=("",), extra=plain)
    (tmp_path / "config.json").rename(tmp_path / "config.stored")
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads((tmp_path / "config.stored").read_text()), "quantization_config": None})
    )
    expected = logits(tmp_path, Unquantized(NoneConfig()))
    (tmp_path / "config.stored").rename(tmp_path / "config.json")
    save_file(stored, tmp_path / "model.safetensors")
    weights = FP8Config(activations="plain")
    found = [logits(tmp_path, FP8(weights))]
    found += on_threads(2, lambda collective: logits(tmp_path, FP8(weights), collective=collective))
    for got in found:
        torch.testing.assert_close(got, expected, atol=5e-4, rtol=0)
    assert not torch.equal(logits(tmp_path), found[0]), "inputs are in FP8, too"


@pytest.mark.parametrize(
    ("layout", "channels", "shared"),
    [(128, 256, 2), (128, 192, 0), (256, 384, 0), ("rows", 96, 2), ("static", 96, 2), ("ignored", 96, 0)],
)
def test_shared_experts_of_a_checkpoint(layout, channels, shared, tmp_path):
    """`layout`: size of blocks with a scale, or another. Shared experts run with the routed ones unless a part of their
    matrices begins inside a block, or they are plain. The result is that of an MLP of their own, on one rank and on
    two."""
    save_random(tmp_path, "deepseek_v3", hidden_size=128, moe_intermediate_size=channels, num_hidden_layers=2)
    found = {name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    plain = ("self_attn", "shared_experts") if layout == "ignored" else ("self_attn",)
    plain = [
        "lm_head",
        *(n.removesuffix(".weight") for n in found if n.endswith(MATRICES) and any(p in n for p in plain)),
    ]
    if isinstance(layout, int):
        for name in [name for name in found if ".mlp." in name and name.endswith("_proj.weight")]:
            found[name], found[f"{name}_scale_inv"] = quantize_blocks(found[name], layout, layout)
        blocks = {"weight_block_size": [layout, layout], "modules_to_not_convert": plain}
        quantize(tmp_path, {**BLOCKS, **blocks}, kept=("",), extra=found)
    else:
        static = layout == "static"
        config = {**STATIC, "ignored_layers": plain} if static else {**CHANNEL, "ignore": plain}
        quantize(tmp_path, config, kept=tuple(plain), tensor=static)
    apart = Driver(load(tmp_path, shared_experts="apart")).step([("a", TOKENS)])[0]

    def on_rank(collective=None) -> torch.Tensor:
        model = load(tmp_path, collective=collective)
        assert model.blocks[-1].mlp.experts.always == shared
        return Driver(model).step([("a", TOKENS)])[0]

    for got in (on_rank(), *on_threads(2, on_rank)):
        # Inputs of parts have a scale each, and so have those of ranks.
        error_T = (got - apart).norm(dim=1) / apart.norm(dim=1)
        assert error_T.median() < 0.1
    assert shared or torch.equal(on_rank(), apart)


@pytest.mark.parametrize("variant", ["gqa", "qwen3_moe"])
def test_blocks_as_we_would_have_made_them(variant, tmp_path):
    """The blocks of two ranks are others, and lose no more. Last blocks are smaller."""
    wide = {"moe_intermediate_size": 256} if variant == "qwen3_moe" else {}
    save_random(tmp_path, variant, hidden_size=192, intermediate_size=256, num_hidden_layers=2, **wide)
    made = FP8Config(scales="block")
    expected = logits(tmp_path, FP8(made))
    rounded = [logits(tmp_path, FP8(FP8Config())), logits(tmp_path, Unquantized(NoneConfig()))]
    on_two = on_threads(2, lambda collective: logits(tmp_path, FP8(made), collective=collective))
    tensors = {name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantize_blocks(tensors[name], 128, 128)
    quantize(tmp_path, {**BLOCKS, "weight_block_size": [128, 128]}, kept=("",), extra=tensors)
    assert torch.equal(logits(tmp_path), expected)
    by_rows, plain = rounded
    assert not torch.equal(expected, by_rows)
    for got in (expected, *on_two):
        assert (got - plain).norm() < 1.5 * (by_rows - plain).norm()


def test_values_and_scales_of_blocks():
    """Those of another implementation, up to the rounding of ties."""
    weight_OI = torch.randn(200, 300) * torch.logspace(-3, 3, 300)
    codes_OI, scale = quantize_blocks(weight_OI, 64, 128)
    expected_OI, expected_scale, _ = in_blocks(weight_OI)
    assert torch.equal(scale, expected_scale) and scale.shape == (4, 3)
    assert (codes_OI.float() != expected_OI.float()).float().mean() < 1e-3
    assert torch.equal(quantize_blocks(torch.zeros(3, 5), 2, 2)[0].float(), torch.zeros(3, 5))


MX = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}


def mx_config(inputs: dict[str, Any] | None) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": MX, "input_activations": inputs}}
    said = {"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "config_groups": groups}
    return {**said, "ignore": ["lm_head"]}


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_mxfp8(layout, tmp_path):
    """Scales of 32 inputs are exponents. On one rank and on two, whose columns of `down` begin inside a group."""
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale

    save_random(tmp_path, "gqa", hidden_size=128, intermediate_size=160)
    plain = {name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    stored = dict(plain)
    for name in [n for n in plain if n.endswith("_proj.weight")]:
        blocks_OGK = plain[name].unflatten(1, (-1, 32))
        codes_OG = (blocks_OGK.abs().amax(-1).log2().floor() - 8 + 127).to(torch.uint8)
        scale_OG1 = decompress_mx_scale(codes_OG).float().unsqueeze(-1)
        values = (blocks_OGK / scale_OG1).clamp(-LARGEST, LARGEST).to(E4M3)
        stored[name], stored[f"{name}_scale"] = values.flatten(1), codes_OG
        plain[name] = (values.float() * scale_OG1).flatten(1)
    modelopt = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}
    kv = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
    scales = {f"model.layers.{i}.self_attn.{x}_proj.{x}_scale": torch.tensor(0.5) for i in range(3) for x in "kv"}
    said, more = (mx_config(None), {}) if layout == "compressed-tensors" else ({**modelopt, **kv}, scales)
    quantize(tmp_path, said, kept=("",), extra=plain)
    path = tmp_path / "config.json"
    hf = path.read_text()
    path.write_text(json.dumps({**json.loads(hf), "quantization_config": None}))
    expected = logits(tmp_path, Unquantized(NoneConfig()))
    path.write_text(hf)
    save_file({**stored, **more}, tmp_path / "model.safetensors")
    # compressed-tensors states 16-bit inputs here.
    config = FP8Config() if layout == "compressed-tensors" else FP8Config(activations="plain")
    found = [logits(tmp_path, FP8(config))]
    found += on_threads(2, lambda collective: logits(tmp_path, FP8(config), collective=collective))
    for got in found:
        torch.testing.assert_close(got, expected, atol=5e-4, rtol=0)
    assert not torch.equal(logits(tmp_path, FP8(FP8Config(activations="fp8"))), found[0]), "inputs are in FP8, too"
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.down_proj.weight_scale"
    save_file({**load_file(file), name: torch.full((128, 5), 255, dtype=torch.uint8)}, file)
    with pytest.raises(ConfigError, match=rf"'{name}' has values that are not numbers"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (mx_config({**MX, "group_size": 64}), "input_activations.group_size is 64: there is 32"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 16}, "group_size is 16: MXFP8 has 32"),
    ],
)
def test_mxfp8_has_groups_of_32(config, says):
    with pytest.raises(ConfigError, match=says):
        read_stored({"quantization_config": config})


def test_modelopt(tmp_path):
    """One scale per matrix, KV scales below k_proj and v_proj, modules with wildcards, in hf_quant_config.json."""
    save_random(tmp_path, "gqa", hidden_size=128)
    extra = {f"model.layers.{i}.self_attn.{x}_proj.{x}_scale": torch.tensor(0.5 + i) for i in range(3) for x in "kv"}
    quantize(tmp_path, STATIC, tensor=True)
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    expected = logits(tmp_path)
    save_file({**load_file(file), **extra}, file)
    hf = json.loads(config.read_text())
    del hf["quantization_config"]
    config.write_text(json.dumps(hf))
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head*"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    model = load(tmp_path, kv_dtype=E4M3)
    assert [block.attention.layer.k_scale.tolist() for block in model.blocks] == [[0.5 + i] * 2 for i in range(3)]
    assert torch.equal(logits(tmp_path), expected)


def test_layers_left_plain(tmp_path):
    save_random(tmp_path, "gqa", hidden_size=128)
    expected = logits(tmp_path, FP8(FP8Config(skip=("layers.1.*", "layers.*.mlp.down"))))
    kept = ("model.layers.1.", *(f"model.layers.{i}.mlp.down" for i in range(3)))
    quantize(tmp_path, {**CHANNEL, "ignore": ["lm_head", r"re:.*layers\.1\.", r"re:.*down_proj$"]}, kept=kept)
    assert torch.equal(logits(tmp_path), expected)


def test_kv_scales_reach_attention(tmp_path):
    """Scales are per tensor or per head. Caches that are not 8-bit are not scaled."""
    save_random(tmp_path, "gqa", hidden_size=128)
    scales = {}
    for layer in range(3):
        scales[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(0.5 + layer)
        scales[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([0.25, 0.75], dtype=torch.bfloat16)
    quantize(tmp_path, {**CHANNEL, "kv_cache_scheme": KV}, extra=scales)
    for layer, block in enumerate(load(tmp_path, kv_dtype=E4M3).blocks):
        assert block.attention.layer.k_scale.tolist() == [0.5 + layer] * 2
        assert block.attention.layer.v_scale.tolist() == [0.25, 0.75]
    assert load(tmp_path).blocks[1].attention.layer.k_scale == 1.0


@pytest.mark.parametrize("wrong", [torch.tensor(0.0), torch.tensor(float("nan")), torch.ones(3)], ids=str)
def test_wrong_scales_are_refused(wrong, tmp_path):
    save_random(tmp_path, "gqa", hidden_size=128)
    names = [f"model.layers.{i}.self_attn.{x}_scale" for i in range(3) for x in "kv"]
    quantize(tmp_path, {**CHANNEL, "kv_cache_scheme": KV}, extra={name: torch.tensor(1.0) for name in names})
    whole = load_file(tmp_path / "model.safetensors")
    for name in ("model.layers.1.self_attn.v_scale", "model.layers.1.self_attn.q_proj.weight_scale"):
        stored = wrong if "v_scale" in name or wrong.numel() > 1 else wrong.expand(len(whole[name]), 1).contiguous()
        save_file({**whole, name: stored}, tmp_path / "model.safetensors")
        says = r"1\.self_attn\.(v_scale|q_proj\.weight_scale)'.* one positive number|weight_scale' has shape \(3,\)"
        with pytest.raises(ConfigError, match=says):
            load(tmp_path)


def changed(path: str, value: object) -> dict:
    config = json.loads(json.dumps(CHANNEL))
    *way, last = path.split("/")
    at = config
    for key in way:
        at = at[key]
    at[last] = value
    return config


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("fp8", "must be an object"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq'.*quant=fp8 reads"),
        (changed("format", "pack-quantized"), "format is 'pack-quantized'"),
        (changed("config_groups", {}), "config_groups"),
        (changed("config_groups/group_0/targets", ["Attention"]), "targets"),
        (changed("config_groups/group_0/weights/num_bits", 4), "weights.num_bits is 4: there is 8"),
        (changed("config_groups/group_0/weights/type", "int"), "weights.type is 'int'"),
        (changed("config_groups/group_0/weights/strategy", "group"), "weights.group_size is None: there are 32"),
        (changed("config_groups/group_0/weights/strategy", "block"), "block_structure is None: it must be two of 64"),
        (changed("config_groups/group_0/input_activations", 8), "input_activations is 8"),
        (changed("config_groups/group_0/output_activations", {}), "output_activations is {}: outputs of layers"),
        (changed("kv_cache_scheme", {**KV, "num_bits": 4}), "kv_cache_scheme is .* it must have num_bits 8"),
        (changed("ignore", "lm_head"), "ignore is 'lm_head'"),
        (changed("ignore", ["re:(a+)+$"]), "not repeated"),
        (changed("ignore", ["re:" + ".*" * 90 + "X"]), "may have 4 stars"),
        (changed("ignore", [".*" * 5 + "X"]), "may have 4 stars"),
        ({**STATIC, "weight_block_size": [128, 100]}, r"weight_block_size is \[128, 100\]"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, r"quant_algo is 'W4A8'"),
        ({**STATIC, "activation_scheme": None}, "activation_scheme is None"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_named(config, named):
    with pytest.raises(ConfigError, match=named):
        FP8(FP8Config()).read_checkpoint(MemoryCheckpoint({"quantization_config": config}))


def test_half_a_merged_layer_cannot_stay_plain():
    stored = read_stored({"quantization_config": {**CHANNEL, "ignore": ["model.layers.0.self_attn.q_proj"]}})
    names = tuple(f"model.layers.0.self_attn.{x}_proj" for x in "qkv")
    with pytest.raises(ConfigError, match=r"leaves model\.layers\.0\.self_attn\.q_proj unquantized.*attn\.qkv"):
        stored.skips(names, "layers.0.attn.qkv")
    assert not stored.skips(("model.layers.1.mlp.down_proj",), "layers.1.mlp.down")


def test_other_quantizers_refuse_it_before_weights_load(tmp_path):
    save_random(tmp_path, "gqa", hidden_size=128)
    quantize(tmp_path, CHANNEL)
    with pytest.raises(ConfigError, match=r"quantized already.*compressed-tensors.*Unquantized takes plain weights"):
        LLM(str(tmp_path), overrides=["engine.device=cpu", "quant=none"])
