"""gpt-oss in the layout of the published folders, MXFP4 experts beside plain layers, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.core.checkpoint import located, open_checkpoint
from dovetail.core.errors import ConfigError
from dovetail.core.layers import experts as core_experts
from dovetail.core.testing.rank_threads import on_threads
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.quant.config import FP4Config
from dovetail.plugins.quant.fp4.quantizer import FP4

from .checkpoints import LEAST_GAP, random_tokens, reference_logits, router_gap
from .driver import Driver, build_model, load_model
from .published import save_published

TOKENS = random_tokens(60, seed=3)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("published")
    return folder, save_published(folder)


def quantizer(folder: Path, **options) -> FP4:
    made = FP4(FP4Config(**options))
    made.read_checkpoint(open_checkpoint(folder))
    return made


def test_logits_of_the_published_layout_equal_transformers(published, monkeypatch):
    """In one step and in chunks beside decoding, on one rank, and on two, of which the second begins inside a block of
    channels: all of them multiply stacked experts."""
    monkeypatch.setattr(core_experts, "PackedLinearExperts", None)
    folder, reference = published
    expected = reference_logits(reference, TOKENS)
    assert router_gap(reference, TOKENS) > LEAST_GAP and expected.std() > 0.5
    driver = Driver(load_model(folder, quantizer=quantizer(folder)))
    (at_once,) = driver.step([("at once", TOKENS)], slack=3, padding=2)
    (start,) = driver.step([("chunks", TOKENS[:20])])
    both = driver.step([("at once", TOKENS[:1]), ("chunks", TOKENS[20:])], num_decode=1)
    for found in (at_once, torch.cat((start, both[1]))):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)

    def run(ranks):
        return Driver(load_model(folder, quantizer=quantizer(folder), collective=ranks)).step([("a", TOKENS)])[0]

    for found in on_threads(2, run):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_greedy_tokens_of_the_engine_with_prefixes_in_the_cache(published):
    """The quantizer is chosen by config.json; the second round finds prefixes."""
    folder, reference = published
    prompts = [random_tokens(n, seed=n) for n in (5, 100, 61)]
    engine = ["engine.device=cpu", "engine.token_budget=48", "engine.depth=2", "engine.page_size=8"]
    with LLM(str(folder), overrides=engine) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
        rounds = [llm.generate(prompts, params) for _ in range(2)]
    assert sum(result.cached_tokens for result in rounds[1]) > 0
    for prompt, *results in zip(prompts, *rounds, strict=True):
        whole = prompt + list(results[0].token_ids)
        assert router_gap(reference, whole) > LEAST_GAP
        expected = reference_logits(reference, whole)[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert [list(result.token_ids) for result in results] == [expected, expected]


BLOCKS = "model.layers.1.mlp.experts.gate_up_proj_blocks"
SCALES = "model.layers.1.mlp.experts.down_proj_scales"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({SCALES: None}, r"8 missing \('model.layers.1.mlp.experts.0.down_proj.scales'"),
        ({BLOCKS: torch.zeros(8, 192, 2, 17, dtype=torch.uint8)}, r"gate_proj.blocks' has shape \(96, 34\)"),
        ({BLOCKS: torch.zeros(8, 191, 2, 16, dtype=torch.uint8)}, r"gate_up_proj_blocks' has shape \(8, 191, 2, 16\)"),
        ({BLOCKS: torch.zeros(7, 192, 2, 16, dtype=torch.uint8)}, "it must have 8 matrices with groups of columns"),
        ({BLOCKS: torch.zeros(8, 192, 2, 16)}, "gate_proj.blocks' is float32 in the checkpoint; it must be uint8"),
        ({SCALES: torch.full((8, 64, 3), 255, dtype=torch.uint8)}, "down_proj.scales.* has values that are not num"),
        ({SCALES: torch.full((8, 64, 3), 193, dtype=torch.uint8)}, r"down_proj.scales.* has scales above 2\^65"),
    ],
    ids=["missing", "bytes of a block", "odd rows", "experts", "dtype", "not numbers", "too large"],
)
def test_weights_that_contradict_the_config_are_named(changed, words, published, tmp_path):
    folder, _ = published
    tensors = load_file(folder / "model.safetensors") | changed
    save_file({name: each for name, each in tensors.items() if each is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    meta = build_model(LlamaConfig(path=str(tmp_path)), device="meta", quantizer=quantizer(tmp_path))
    checkpoint = open_checkpoint(tmp_path)
    # Values are read at last.
    with pytest.raises(ConfigError, match=words), located(checkpoint):
        meta.check_checkpoint(checkpoint)
        load_model(tmp_path, quantizer=quantizer(tmp_path))
