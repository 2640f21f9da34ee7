"""Drafts of one pass with mask tokens (spec_decode=parallel)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dovetail import LLM, SamplingParams
from dovetail.core.compose import compose
from dovetail.core.engine.cost import bind_cost
from dovetail.core.errors import ConfigError
from dovetail.core.testing.draft_bench import Bench
from dovetail.core.testing.executor_scripts import small_composition

from .heads import HEADS, HIDDEN, bound, eagle_tensors, save_head
from .test_eagle import norm, rotate

pytestmark = pytest.mark.nightly

PROMPTS = ["def f(x):\n", "class Stack:\n    def push(self, item):\n        self.items.append(item)\n"]


def test_the_text_is_that_of_plain_decoding() -> None:
    """Greedy and seeded, in chunks, with preemption, and again with prefixes in the cache."""
    small = ["engine.device=cpu", "engine.max_len=96", "engine.max_seqs=4"]
    params = [
        SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=4, max_tokens=16, top_k=20, ignore_eos=True),
    ]
    with LLM("tiny", overrides=small) as plain:
        expected = [result.token_ids for result in plain.generate(PROMPTS, params)]
    tight = ["engine.kv_pages=10", "engine.token_budget=9", "engine.depth=2"]
    rates = "spec_decode.lookahead=3"
    with LLM("tiny", overrides=[*small, *tight, "spec_decode=parallel_tiny", rates]) as llm:
        for _ in range(2):
            assert [result.token_ids for result in llm.generate(PROMPTS, params)] == expected
        assert llm.engine.counters.drafted > 0
        assert llm.engine.kv.stats().owned == 0


def test_one_pass_drafts_all_from_masks(tmp_path: Path) -> None:
    """The first draft is that of EAGLE-3. Behind the text the pass feeds mask tokens with the mask's feature."""
    save_head(tmp_path / "parallel", "parallel")
    save_head(tmp_path / "eagle3", "eagle3")
    drafts, passes = {}, {}
    for name in ("parallel", "eagle3"):
        drafter = bound(name, tmp_path / name, "spec_decode.lookahead=4")
        seen, forward = [], drafter.layer.forward
        bench = Bench(drafter, drafter.target)
        bench.seat({0: [5, 6, 7, 8, 9], 1: [3, 4, 3, 4]})
        drafter.layer.forward = lambda *given, seen=seen, forward=forward: (seen.append(given), forward(*given))[1]
        drafts[name] = [guess.tokens for guess in bench.guess()]
        passes[name] = seen
        if name == "parallel":
            embeds_TC, features_TC, ctx = seen[0]
            masked_T = ctx.positions_T >= torch.tensor([5, 4]).repeat_interleave(len(embeds_TC) // 2)
            mask_C, mask_F = drafter.target.embed(torch.tensor([7])), drafter.layer.mask_F[None]
            assert int(masked_T.sum()) >= 6
            assert torch.equal(embeds_TC[masked_T], mask_C.expand(int(masked_T.sum()), -1))
            assert torch.allclose(features_TC[masked_T], drafter.layer.fuse(mask_F), atol=1e-4)
    assert [len(seen) for seen in passes.values()] == [1, 4]
    assert [row[0] for row in drafts["parallel"]] == [row[0] for row in drafts["eagle3"]]
    assert all(len(row) == 4 for row in drafts["parallel"])


def two_layers() -> dict[str, torch.Tensor]:
    """Return the tensors that a head of two layers has beside those of one. The second one has EAGLE's sizes."""
    generator = torch.Generator().manual_seed(11)
    found = {name: x for name, x in eagle_tensors("layers.1").items() if name.startswith("layers.1.")}
    found = {name: x if x.ndim == 1 else torch.randn(x.shape, generator=generator) / 16 for name, x in found.items()}
    return found | {"layers.1.input_layernorm.weight": 1 + 0.1 * torch.randn(HIDDEN, generator=generator)}


def plain_layers(
    tensors: dict[str, torch.Tensor], embeds_TC: torch.Tensor, features_TC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the residual and the normed states behind two layers, without pages."""
    residual = features_TC
    first = norm(embeds_TC, tensors["midlayer.input_layernorm.weight"])
    x = torch.cat((first, norm(residual, tensors["midlayer.hidden_norm.weight"])), -1)
    for layer in ("midlayer", "layers.1"):
        if layer == "layers.1":
            x = norm(residual, tensors["layers.1.input_layernorm.weight"])
        q, k, v = (
            F.linear(x, tensors[f"{layer}.self_attn.{part}_proj.weight"]).view(len(x), heads, 32).transpose(0, 1)
            for part, heads in (("q", 4), ("k", 2), ("v", 2))
        )
        attended = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        residual = residual + F.linear(attended.transpose(0, 1).flatten(1), tensors[f"{layer}.self_attn.o_proj.weight"])
        x = norm(residual, tensors[f"{layer}.post_attention_layernorm.weight"])
        gate, up = (F.linear(x, tensors[f"{layer}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        residual = residual + F.linear(F.silu(gate) * up, tensors[f"{layer}.mlp.down_proj.weight"])
    return residual, norm(residual, tensors["norm.weight"])


@pytest.mark.parametrize("renamed", [False, True])
def test_a_head_may_have_several_layers(renamed: bool, tmp_path: Path) -> None:
    """`renamed`: the first layer is called layers.0, and the second one has a norm that nothing reads."""
    more = two_layers()
    tensors = HEADS["parallel"][1]() | more
    if renamed:
        own = {name: x for name, x in tensors.items() if name.startswith("midlayer.")}
        more |= {name.replace("midlayer", "layers.0"): x for name, x in own.items()} | dict.fromkeys(own)
        more["layers.1.hidden_norm.weight"] = torch.ones(HIDDEN)
    save_head(tmp_path / "head", "parallel", {"num_hidden_layers": 2}, more)
    drafter = bound("parallel", tmp_path / "head", "spec_decode.lookahead=3")
    assert [group.layers for group in drafter.kv_groups()] == [(0, 1)]
    bench, calls, forward = Bench(drafter, drafter.target), [], drafter.layer.forward
    drafter.layer.forward = lambda *given: calls.append((given, forward(*given))) or calls[-1][1]
    bench.seat({0: [5, 6, 7, 8, 9]})
    ((embeds_TC, features_TC, _), found), *_ = calls
    expected = plain_layers(tensors, embeds_TC, features_TC)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-3), (one - other).abs().max()
    assert len(bench.guess()[0].tokens) == 3 and len(calls) == 2
    facts = (
        small_composition("spec_decode=parallel", f"spec_decode.path={tmp_path / 'head'}").part("spec_decode").facts()
    )
    copies = "embed_tokens.weight", "d2t", "t2d"
    assert facts.spec.parameters.total == sum(x.numel() for name, x in tensors.items() if name not in copies)


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        ({}, {"mask_hidden": None}, "1 missing .*mask_hidden"),
        ({}, {"mask_hidden": torch.zeros(5)}, "mask_hidden. has shape .5,.*768"),
        ({"ptd_token_id": None}, {}, "'ptd_token_id' is missing"),
        ({"ptd_token_id": 4096}, {}, "ptd_token_id is 4096; it must be from 0 to 4095"),
        ({"num_hidden_layers": 2}, {}, "9 missing .*layers.1.self_attn.q_proj.weight"),
        (
            {"num_hidden_layers": 17},
            {},
            "num_hidden_layers is 17; spec_decode=parallel runs heads of at most 16 layers",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    config: dict[str, Any], tensors: dict[str, Any], says: str, tmp_path: Path
) -> None:
    save_head(tmp_path / "head", "parallel", config, tensors)
    with pytest.raises(ConfigError, match=says):
        bound("parallel", tmp_path / "head")


def test_trees_are_refused() -> None:
    with pytest.raises(ConfigError, match="tree=12: spec_decode=parallel drafts chains alone"):
        compose(["app=plan", "spec_decode=parallel_tiny", "spec_decode.tree=12"])


def test_its_time_is_one_pass() -> None:
    def drafting(name: str, lookahead: int) -> float:
        words = [f"spec_decode={name}_llama3_8b", f"spec_decode.lookahead={lookahead}"]
        composition = compose(["app=plan", "cost=h200", "model=llama3_8b", *words])
        cost = bind_cost(composition, composition.part("model").facts(), "cuda")
        assert cost is not None
        return cost.draft_seconds(1, lookahead, 1000)

    assert drafting("parallel", 8) == pytest.approx(drafting("parallel", 2))
    assert drafting("parallel", 4) < drafting("eagle3", 4) / 2
