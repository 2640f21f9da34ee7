"""gpt-oss in the layout of the published folders, MXFP4 experts beside plain layers, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.testing.rank_threads import on_threads
from dovetail.plugins.quant.config import FP4Config
from dovetail.plugins.quant.fp4.quantizer import FP4

from .checkpoints import LEAST_GAP, random_tokens, reference_logits, router_gap, save_random
from .driver import Driver, load_model

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = torch.cat((VALUES, -VALUES))
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
    ],
}
TOKENS = random_tokens(60, seed=3)


def pack(weight_EIO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (blocks [E, O, G, 16], scales [E, O, G], the weight that they are) of a stacked plain matrix."""
    blocks = weight_EIO.transpose(1, 2).unflatten(2, (-1, 32))
    exponent = (blocks.abs().amax(-1) / 6).log2().round()
    codes = (blocks / torch.exp2(exponent)[..., None]).unsqueeze(-1).sub(VALUES).abs().argmin(-1)
    exact = VALUES[codes] * torch.exp2(exponent)[..., None]
    pairs = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return pairs, (exponent + 127).to(torch.uint8), exact.flatten(2).transpose(1, 2)


def save_published(folder: Path, **changes) -> torch.nn.Module:
    """Save a random model as openai/gpt-oss-20b is published and return its transformers model."""
    model = save_random(folder, "gpt_oss", **changes)
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"], exact = pack(tensors.pop(name))
        model.get_parameter(name).data.copy_(exact)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))
    return model


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("published")
    return folder, save_published(folder)


def quantizer(folder: Path, **options) -> FP4:
    made = FP4(FP4Config(**options))
    made.read_checkpoint(open_checkpoint(folder))
    return made


def test_logits_of_the_published_layout_equal_transformers(published):
    """In one step and in chunks beside decoding, on one rank and on two, whose parts have whole blocks or not."""
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
