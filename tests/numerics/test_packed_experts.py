"""Routed experts in packed formats. Their matrices are stacked, and give the values and tokens of a loop over experts,
on one rank and on two."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.core.interfaces import Activation, ModelSpec, Routing
from dovetail.core.interfaces.activation import PLAIN
from dovetail.core.interfaces.expert import PARTS
from dovetail.core.layers import Experts, load_weights
from dovetail.core.layers import experts as core_experts
from dovetail.core.layers.looped_experts import LoopedExperts
from dovetail.core.testing.model_driver import Alone, Lazy, build_context
from dovetail.core.testing.numeric import poisoned_memory
from dovetail.core.testing.rank_threads import on_threads
from dovetail.plugins.quant.config import FP4Config, GGUFConfig, Int4Config, NF4Config
from dovetail.plugins.quant.fp4.quantizer import FP4
from dovetail.plugins.quant.gguf.quantizer import GGUF
from dovetail.plugins.quant.int4.quantizer import Int4
from dovetail.plugins.quant.nf4.quantizer import NF4Quantizer

from .checkpoints import save_random
from .driver import Driver, load_model
from .test_gguf_blocks import small_blocks
from .test_int4_checkpoints import LAYOUTS, TOKENS, load, quantize

ROUNDED = {
    "int4": lambda: Int4(Int4Config(group=32)),
    "nvfp4": lambda: FP4(FP4Config(block=16)),
    "nf4": lambda: NF4Quantizer(NF4Config()),
}


@pytest.mark.parametrize("name", [*LAYOUTS, *ROUNDED])
def test_stacked_experts_give_what_a_loop_gives(name, tmp_path, monkeypatch):
    """A rank of two has half of the channels, which begin inside a group; with act-order it has some of each group."""
    save_random(tmp_path, "qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    if name in LAYOUTS:
        quantize(tmp_path, LAYOUTS[name])

    def logits(ranks=None):
        options = {} if ranks is None else {"collective": ranks}
        if name in LAYOUTS:
            model = load(tmp_path / "stored", **options)
        else:
            model = load_model(tmp_path, quantizer=ROUNDED[name](), **options)
        methods = [sparse.experts.method for sparse in model._sparse()]
        assert methods
        return Driver(model).step([("a", TOKENS)])[0], {method.stacked for method in methods}

    found = [logits(), *on_threads(2, logits)]
    assert [stacked for _, stacked in found] == [{True}] * 3
    monkeypatch.setattr(core_experts, "PackedLinearExperts", LoopedExperts)
    for (got, _), (expected, stacked) in zip(found, [logits(), *on_threads(2, logits)], strict=True):
        assert stacked == {False} and expected.std() > 0.1
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)
        assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q5_K", "Q8_0"), ("Q4_0", "Q4_K")])
def test_blocks_of_gguf_are_stacked(kinds, monkeypatch):
    """gate and up of one type, down of another; on two ranks blocks of 256 channels are whole."""
    torch.manual_seed(0)
    names = [tuple(f"{expert}.{part}" for part in PARTS) for expert in range(3)]
    sizes = {"gate": (512, 256), "up": (512, 256), "down": (256, 512)}
    kind_of = {name: kinds[name.endswith("down")] for each in names for name in each}
    stored = {name: small_blocks(kind, *sizes[name.split(".")[1]]) for name, kind in kind_of.items()}
    routing = Routing(torch.tensor([[0, 2], [1, -1], [2, 1], [-1, -1]], dtype=torch.int32), torch.rand(4, 2))
    x_TC = torch.randn(4, 256)

    def output(rank: int, size: int) -> torch.Tensor:
        quantizer, ranks = GGUF(GGUFConfig()), Alone(None)
        quantizer.types, ranks.rank, ranks.size = kind_of, rank, size
        spec = ModelSpec("none", 1, 1, 1, 1, 1, 1, 1, 1, "float32")
        with poisoned_memory():
            layer = Experts("mlp.experts", names, build_context(spec, quantizer=quantizer, collective=ranks), 256, 512)
            tensors = ((f"{name}.weight", partial(Lazy, value)) for name, value in stored.items())
            load_weights(layer.weights(), tensors)
            layer.finish()
        assert layer.method.stacked == (core_experts.PackedLinearExperts is not LoopedExperts)
        return layer.method.apply(layer.params, Activation(PLAIN, x_TC), routing)

    found = [output(0, 1), *(output(rank, 2) for rank in range(2))]
    torch.testing.assert_close(found[1] + found[2], found[0])
    monkeypatch.setattr(core_experts, "PackedLinearExperts", LoopedExperts)
    torch.testing.assert_close(output(0, 1), found[0])
    assert found[0][:3].abs().max() > 1e-3 and not found[0][3].any()


def test_greedy_tokens_are_those_of_a_loop(tmp_path, monkeypatch):
    """From the engine, in batches."""
    save_random(tmp_path, "qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    quantize(tmp_path, LAYOUTS["gptq"])
    found = []
    for kind in (core_experts.PackedLinearExperts, LoopedExperts):
        monkeypatch.setattr(core_experts, "PackedLinearExperts", kind)
        with LLM(str(tmp_path / "stored"), overrides=["engine.device=cpu", "engine.kv_pages=64"]) as llm:
            results = llm.generate([TOKENS, TOKENS[:3]], SamplingParams(max_tokens=12, temperature=0))
            found.append([result.token_ids for result in results])
    assert found[0] == found[1]
