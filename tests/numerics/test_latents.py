"""Compressed attention in the engine: parts that must not change a token, 8-bit latents, adapters, skipped layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.errors import RequestError
from dovetail.core.interfaces import PageOp, PageOpKind
from dovetail.core.memory.pools import apply_page_ops, make_host_pools, make_pools
from dovetail.core.testing.model_driver import build_context
from dovetail.core.testing.rank_threads import on_threads
from dovetail.plugins.adapter.config import LoRAConfig
from dovetail.plugins.adapter.lora.adapters import LoRA
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama

from .checkpoints import random_tokens, save_random
from .driver import CPU, Driver, load_model

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
TOKENS = random_tokens(90, seed=3)
BASE = ["engine.device=cpu", "engine.max_len=160", "engine.page_size=8"]
PREFIX = random_tokens(37, seed=1)
PROMPTS = [PREFIX + random_tokens(n, seed=n) for n in (3, 30)] + [random_tokens(n, seed=n) for n in (1, 58)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("deepseek")
    save_random(path, "deepseek_v2_lite", **SMALL)
    return path


def test_parts_do_not_change_a_token(folder):
    """Prefix caching, copies of shared pages, a host tier, preemption, drafts and chunks of any size."""

    def run(*overrides: str) -> list[list[int]]:
        params = [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)] * len(PROMPTS)
        params[1] = SamplingParams(temperature=0.9, seed=5, n=2, max_tokens=24, ignore_eos=True)
        with LLM(str(folder), overrides=[*BASE, *overrides]) as llm:
            rounds = [llm.generate(PROMPTS, params) for _ in range(2)]
            llm.engine.kv.check()
        found = [[one.token_ids for result in results for one in result.completions] for results in rounds]
        assert found[0] == found[1], "the second run differs, with the prefix cache as the first has left it"
        return found[0]

    reference = run("kv_cache=paged", "engine.max_seqs=1", "engine.depth=1")
    assert run("kv_cache=radix", "engine.depth=4", "executor.delay=3", "scheduler.max_chunk=7") == reference
    few = ["kv_cache=prefix_hash", "kv_cache.host_pages=40", "engine.kv_pages=24", "engine.depth=2"]
    assert run(*few, "spec_decode=ngram") == reference


def in_eight_bits(folder) -> Llama:
    config = LlamaConfig(path=str(folder))
    model = Llama(config, replace(build_context(Llama.spec(config)), kv_dtype=torch.float8_e4m3fn))
    model.load(open_checkpoint(folder).open())
    return model


def test_latents_in_eight_bits_are_near_plain_ones(folder):
    """Later tokens may attend to those that selected another expert."""
    expected = Driver(load_model(folder)).step([("a", TOKENS)])[0]
    model = in_eight_bits(folder)
    (group,) = model.kv_groups
    assert [plane.bytes_per_token for plane in group.planes] == [24, 4, 8 * 4] and group.kind == "mla"
    driver = Driver(model)
    found = torch.cat([*driver.step([("a", TOKENS[:-2])]), *driver.step([("a", TOKENS[-2:])], num_decode=1)])
    error_T = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert 1e-4 < error_T.median() < 0.1


def test_pages_of_eight_bit_latents_are_copied_and_swapped(folder):
    (group,) = in_eight_bits(folder).kv_groups
    pools = make_pools([group], {group.id: 3}, CPU)
    host = make_host_pools([group], {group.id: 2}, CPU)
    for plane in pools[group.id].planes.values():
        plane.view(torch.uint8).random_(0, 127)
    before = {name: plane.clone() for name, plane in pools[group.id].planes.items()}
    ops = [(PageOpKind.COPY, 1, 2), (PageOpKind.STORE, 1, 2), (PageOpKind.LOAD, 2, 3)]
    apply_page_ops(pools, [PageOp(kind, group.id, src, dst) for kind, src, dst in ops], host)
    for name, plane in pools[group.id].planes.items():
        for page in (2, 3):
            got, want = (x.view(torch.uint8) for x in (plane[:, page].contiguous(), before[name][:, 1].contiguous()))
            assert torch.equal(got, want), (name, page)


def test_ranks_hold_the_same_latents(folder):
    def pages(ranks) -> list[torch.Tensor]:
        driver = Driver(load_model(folder, collective=ranks))
        driver.step([("a", TOKENS)])
        return [plane[:, 1:].clone() for pool in driver.paging.pools.values() for plane in pool.planes.values()]

    (first,), (second,) = on_threads(2, pages)
    torch.testing.assert_close(first, second, equal_nan=True, atol=1e-5, rtol=0)


def test_an_adapter_of_the_up_projection_is_refused(folder, tmp_path):
    """It is folded into queries and outputs; the other matrices can be adapted."""
    lora = LoRA(LoRAConfig(slots=1), CPU, torch.float32)
    model = load_model(folder, adapters=lora)
    lora.allocate()
    name = "base_model.model.model.layers.0.self_attn.kv_b_proj.lora_{}.weight"
    save_file(
        {name.format("A"): torch.ones(4, 24), name.format("B"): torch.ones(88, 4)},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["kv_b_proj"]}'
    )
    with pytest.raises(RequestError, match="no linear layer 'model.layers.0.self_attn.kv_b_proj' to adapt"):
        lora.read("a@1", tmp_path)
    names = {part.name.rpartition(".")[2] for linear in model.blocks[0].attention.products for part in linear.parts}
    assert names == {"q_proj", "kv_a_proj_with_mqa", "o_proj"}


def test_layers_behind_the_last_are_skipped(tmp_path):
    save_random(tmp_path, "deepseek_v3", **SMALL, num_nextn_predict_layers=1)
    expected = Driver(load_model(tmp_path)).step([("a", TOKENS)])[0]
    tensors = {name: each for file in tmp_path.glob("*.safetensors") for name, each in load_file(file).items()}
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    behind = ("model.layers.2.eh_proj.weight", "model.layers.2.self_attn.kv_b_proj.weight")
    save_file({**tensors, **{name: torch.ones(2, 2) for name in behind}}, tmp_path / "model.safetensors")
    assert torch.equal(Driver(load_model(tmp_path)).step([("a", TOKENS)])[0], expected)
