"""Models with experts beyond their logits: what is refused, quantized experts, and uniform routing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.compose import cli, compose
from dovetail.core.errors import ConfigError, RequestError
from dovetail.core.interfaces import Collective, Quantizer
from dovetail.core.interfaces.collective import Alone
from dovetail.core.layers import Experts, SharedExperts
from dovetail.core.testing.executor_scripts import quiet
from dovetail.core.testing.rank_threads import on_threads
from dovetail.core.worker.loader import load_rank
from dovetail.plugins.adapter.config import LoRAConfig
from dovetail.plugins.adapter.lora.adapters import LoRA
from dovetail.plugins.experts.config import TensorConfig, WholeConfig
from dovetail.plugins.experts.everywhere import TensorPlacement, WholePlacement
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama
from dovetail.plugins.model.llama.experts import SparseMLP
from dovetail.plugins.quant.config import FP4Config, FP8Config, Int4Config, Int8Config, NF4Config
from dovetail.plugins.quant.fp4.quantizer import FP4
from dovetail.plugins.quant.fp8.quantizer import FP8
from dovetail.plugins.quant.int4.quantizer import Int4
from dovetail.plugins.quant.int8.format import quantize_rows as round_to_int8
from dovetail.plugins.quant.int8.quantizer import Int8
from dovetail.plugins.quant.nf4.quantizer import NF4Quantizer

from .checkpoints import random_tokens, save_random
from .driver import CPU, Driver, build_model, load_model

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
TOKENS = random_tokens(40, seed=3)


def change(folder: Path, drop: str = "\n", **changed: torch.Tensor | None) -> None:
    """Replace tensors of a checkpoint, add some, or leave them out, as those with `drop` in their names, and write all
    to a single file."""
    tensors: dict[str, torch.Tensor | None] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    tensors = {name: tensor for name, tensor in tensors.items() if drop not in name} | changed
    save_file({name: one for name, one in tensors.items() if one is not None}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (None, rf"describes: 1 missing \('{EXPERT}'\)"),
        (
            torch.zeros(48, 63),
            rf"\.safetensors: tensor '{EXPERT}' has shape \(48, 63\) .*48 outputs and 64 inputs",
        ),
        (torch.zeros(48, 64, dtype=torch.int8), rf"\.safetensors: tensor '{EXPERT}' is int8 in the checkpoint"),
    ],
    ids=["missing", "truncated", "integers"],
)
def test_an_expert_that_does_not_fit_is_named_with_its_file(tensor, words, tmp_path, capsys):
    save_random(tmp_path, "qwen3_moe")
    change(tmp_path, **{EXPERT: tensor})
    model = build_model(LlamaConfig(path=str(tmp_path)), device="meta")
    with pytest.raises(ConfigError, match=words):
        model.check_checkpoint(open_checkpoint(tmp_path))


def test_adapters_of_experts_are_refused(tmp_path):
    """The adapter has matrices of experts; attention's would work."""
    save_random(tmp_path, "mixtral")
    lora = LoRA(LoRAConfig(slots=1), CPU, torch.float32)
    model = load_model(tmp_path, adapters=lora)
    lora.allocate()
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.1.w1.lora_{}.weight"
    (adapter := tmp_path / "adapter").mkdir()
    save_file(
        {name.format("A"): torch.ones(4, 64), name.format("B"): torch.ones(96, 4)},
        adapter / "adapter_model.safetensors",
    )
    (adapter / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["w1"]}'
    )
    with pytest.raises(RequestError, match="no linear layer 'model.layers.0.block_sparse_moe.experts.1.w1' to adapt"):
        lora.read("a@1", adapter)
    assert model.build.adapters is lora


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("quantizer", [FP8(FP8Config()), Int8(Int8Config())], ids=["fp8", "int8"])
def test_quantized_experts_are_near_plain_ones(quantizer, variant, tmp_path):
    """Errors are those of 8 bits; later tokens attend to those that selected another expert."""
    save_random(tmp_path, variant)
    expected = Driver(load_model(tmp_path)).step([("a", TOKENS)])[0]
    got = Driver(load_model(tmp_path, quantizer=quantizer)).step([("a", TOKENS)], padding=3)[0]
    error_T = ((got - expected).norm(dim=1) / expected.norm(dim=1))[:9]
    assert 1e-4 < error_T.median() < 0.25


def together(model: Llama) -> int:
    """Shared experts of the last layer that are in slots of its routed ones."""
    mlp = model.blocks[-1].mlp
    assert isinstance(mlp, SparseMLP) and (mlp.shared is None) == (mlp.experts.always > 0)
    return mlp.experts.always


@pytest.mark.parametrize(("variant", "shared"), [("glm4_moe", 1), ("deepseek_v3", 2)])
def test_shared_experts_run_with_the_routed_ones(variant, shared, tmp_path):
    """The result is that of an MLP of their own, on one rank and on two."""
    save_random(tmp_path, variant)
    apart = load_model(tmp_path, LlamaConfig(path=str(tmp_path), shared_experts="apart"))
    assert together(apart) == 0
    expected = Driver(apart).step([("a", TOKENS)], padding=3)[0]
    model = load_model(tmp_path)
    assert together(model) == shared
    torch.testing.assert_close(Driver(model).step([("a", TOKENS)], padding=3)[0], expected, atol=1e-5, rtol=0)

    def on_rank(ranks: Collective) -> torch.Tensor:
        placement = TensorPlacement(TensorConfig())
        placement.bind(ranks, 1)
        model = load_model(tmp_path, collective=ranks, placement=placement)
        assert together(model) == shared
        return Driver(model).step([("a", TOKENS)])[0]

    for got in on_threads(2, on_rank):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


ATTENTION = ["layers.*.attn.*"]
WIDE = {"moe_intermediate_size": 64}
FP8_BESIDE_PLAIN = FP8(FP8Config(skip=["layers.*.mlp.shared.*"]))


class OfRouted(FP8):
    """Matches patterns with the numbers of experts alone."""

    slot_paths = False


def mixed(layers: str) -> Quantizer:
    return compose(["quant=mixed", f"quant.layers=[{layers}]"]).build("quant")


class Counting(TensorPlacement):
    rebalance = 5


@pytest.mark.parametrize(
    ("variant", "changes", "options", "shared"),
    [
        ("glm4_moe", {}, dict(quantizer=FP8(FP8Config())), 1),
        ("glm4_moe", {}, dict(quantizer=FP8(FP8Config(scales="block"))), 1),
        ("glm4_moe", {}, dict(quantizer=FP8_BESIDE_PLAIN), 0),
        ("glm4_moe", {}, dict(quantizer=Int8(Int8Config())), 1),
        ("glm4_moe", {"moe_intermediate_size": 64}, dict(quantizer=Int4(Int4Config())), 1),
        ("glm4_moe", {}, dict(quantizer=Int4(Int4Config(skip=["layers.*.mlp.shared.*"]))), 0),
        ("deepseek_v3", {"moe_intermediate_size": 128}, dict(quantizer=NF4Quantizer(NF4Config(skip=ATTENTION))), 2),
        ("glm4_moe", WIDE, dict(quantizer=FP4(FP4Config(block=32))), 1),
        ("glm4_moe", WIDE, dict(quantizer=FP4(FP4Config(block=32, layers="experts"))), 0),
        ("glm4_moe", {}, dict(adapters=LoRA(LoRAConfig(slots=1), CPU, torch.float32)), 0),
        ("glm4_moe", {}, dict(placement=WholePlacement(WholeConfig())), 0),
        ("glm4_moe", {}, dict(placement=Counting(TensorConfig())), 0),
        ("glm4_moe", {}, dict(quantizer=OfRouted(FP8Config())), 0),
        ("glm4_moe", {}, dict(quantizer=mixed("layers.*.mlp.*")), 1),
        ("glm4_moe", {}, dict(quantizer=mixed("layers.*.mlp.experts.*")), 0),
        ("deepseek_v3", {}, dict(quantizer=FP8(FP8Config(skip=ATTENTION))), 2),
        ("deepseek_v3", {"moe_intermediate_size": 128}, dict(quantizer=FP8(FP8Config(scales="block"))), 2),
    ],
)
def test_which_shared_experts_run_with_the_routed_ones(variant, changes, options, shared, tmp_path):
    """Those of an equal format, where placement and quantizer support them. The result is near that of an MLP."""
    save_random(tmp_path, variant, **changes)
    if "placement" in options:
        options["placement"].bind(Alone(None), 1)
    model = load_model(tmp_path, **options)
    assert together(model) == shared
    if shared:
        alone = load_model(tmp_path, LlamaConfig(path=str(tmp_path), shared_experts="apart"), **options)
        expected = Driver(alone).step([("a", TOKENS)])[0]
        got = Driver(model).step([("a", TOKENS)])[0]
        error_T = ((got - expected).norm(dim=1) / expected.norm(dim=1))[:9]
        assert error_T.median() < 0.05
        assert not torch.allclose(got, Driver(load_model(tmp_path)).step([("a", TOKENS)])[0], rtol=1e-3)


def test_shared_experts_stay_apart_from_experts_with_biases(tmp_path):
    """Biases have an entry for each routed expert."""
    save_random(tmp_path, "glm4_moe")
    build = build_model(LlamaConfig(path=str(tmp_path))).build
    names = [tuple(f"{expert}.{part}" for part in ("gate", "up", "down")) for expert in range(4)]
    shared = SharedExperts(1, ("gate", "up", "down"), "layers.1.mlp.shared")
    for bias in (False, True):
        made = Experts("layers.1.mlp.experts", names, build, 64, 48, bias=bias, shared=shared)
        assert (made.always, made.shape.experts) == ((0, 4) if bias else (1, 5))


def test_engines_run_shared_experts_with_the_routed_ones():
    words = "model=small_mtp engine.device=cpu engine.max_len=64 engine.kv_pages=16 engine.max_seqs=2".split()
    for word, shared in (("auto", 1), ("apart", 0)):
        rank = load_rank(compose([*words, f"model.shared_experts={word}"], app="generate"), quiet)
        assert together(rank.parts.model) == shared


INT8_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True},
}


@pytest.mark.parametrize(("ignored", "shared"), [([], 1), (["re:.*shared_experts.*"], 0)])
def test_int8_experts_of_a_checkpoint_are_those_that_are_rounded_as_they_load(ignored, shared, tmp_path):
    save_random(tmp_path, "glm4_moe")
    skip = ["layers.*.mlp.shared.*"] if ignored else []
    rounded = load_model(tmp_path, quantizer=Int8(Int8Config(skip=skip)))
    expected = Driver(rounded).step([("a", TOKENS)])[0]
    config = json.loads((tmp_path / "config.json").read_text())
    quantized = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"0": INT8_GROUP}}
    config["quantization_config"] = quantized | {"ignore": ["lm_head", *ignored]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = {}
    for file in tmp_path.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if name.endswith("proj.weight") and not (ignored and "shared_experts" in name):
                stored[name], stored[f"{name}_scale"] = round_to_int8(tensor)
    change(tmp_path, **stored)
    checkpoint = open_checkpoint(tmp_path)
    quantizer = Int8(Int8Config())
    quantizer.read_checkpoint(checkpoint)
    model = load_model(tmp_path, quantizer=quantizer)
    assert together(model) == together(rounded) == shared
    torch.testing.assert_close(Driver(model).step([("a", TOKENS)])[0], expected, atol=1e-4, rtol=0)
    scale = "model.layers.1.mlp.experts.2.down_proj.weight_scale"
    change(tmp_path, **{scale: torch.zeros_like(stored[scale])})
    with pytest.raises(ConfigError, match=rf"{scale}.*must be one positive number"):
        load_model(tmp_path, quantizer=quantizer)


def test_layers_for_multi_token_prediction_are_skipped(tmp_path):
    """GLM-4.5 has them behind the last layer."""
    save_random(tmp_path, "glm4_moe")
    expected = Driver(load_model(tmp_path)).step([("a", TOKENS)])[0]
    behind = ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.gate.weight")
    change(tmp_path, **{name: torch.ones(2, 2) for name in behind})
    assert torch.equal(Driver(load_model(tmp_path)).step([("a", TOKENS)])[0], expected)
    change(tmp_path, **{"model.layers.30.x.weight": torch.ones(2)})
    with pytest.raises(ConfigError, match=r"1 unexpected \('model.layers.30.x.weight'\)"):
        load_model(tmp_path)


@pytest.mark.parametrize("variant", ["mixtral", "glm4_moe"])
def test_stacked_experts_are_read_too(variant, tmp_path):
    """The layout of transformers' own modules: a tensor for each matrix of all experts, on one rank and on two."""
    model = save_random(tmp_path, variant)
    expected = Driver(load_model(tmp_path)).step([("a", TOKENS)])[0]
    single = {n: w for f in tmp_path.glob("*.safetensors") for n, w in load_file(f).items() if ".experts.0." in n}
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    model.save_pretrained(tmp_path, save_original_format=False)
    checkpoint = open_checkpoint(tmp_path)
    assert any(len(header.shape) == 3 for header in checkpoint.tensors().values())
    build_model(LlamaConfig(path=str(tmp_path)), device="meta").check_checkpoint(checkpoint)
    assert torch.equal(Driver(load_model(tmp_path)).step([("a", TOKENS)])[0], expected)
    for got in on_threads(2, lambda ranks: Driver(load_model(tmp_path, collective=ranks)).step([("a", TOKENS)])[0]):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    (name, *_) = (name for name in checkpoint.tensors() if name.endswith("gate_up_proj"))
    change(tmp_path, **single)
    with pytest.raises(ConfigError, match=r"a tensor of its own in the checkpoint, too. Remove one of them"):
        build_model(LlamaConfig(path=str(tmp_path)), device="meta").check_checkpoint(open_checkpoint(tmp_path))
    change(tmp_path, drop=".experts.0.", **{name: torch.zeros(3, 4, 5)})
    with pytest.raises(
        ConfigError, match=rf"model.safetensors: .*{name}' has shape \(3, 4, 5\) .* must have \d matrices"
    ):
        build_model(LlamaConfig(path=str(tmp_path)), device="meta").check_checkpoint(open_checkpoint(tmp_path))


def test_uniform_routing_runs_in_the_engine():
    words = "model=qwen3_30b_a3b model.routing=uniform model.hf.num_hidden_layers=2 model.hf.hidden_size=64 "
    words += "model.hf.num_attention_heads=2 model.hf.num_key_value_heads=1 model.hf.head_dim=32 engine.device=cpu "
    words += "model.hf.moe_intermediate_size=16 model.hf.num_experts=16 engine.max_len=64 engine.kv_pages=64"
    with LLM(overrides=words.split()) as llm:
        (result,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert len(result.token_ids) == 4
    assert cli.main([*words.split(), "model.load=auto"]) == 2
