"""adapter=lora against PEFT: random weights and factors, float32, adapters and the base model in one batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dovetail.core.testing.rank_threads import on_threads
from dovetail.plugins.adapter.config import LoRAConfig
from dovetail.plugins.adapter.lora.adapters import LoRA

from .adapters import TARGETS, adapted_logits, save_adapter
from .checkpoints import random_tokens, reference_logits, save_random
from .driver import Driver, load_model

TOLERANCE = 2e-4
PATTERNS = {"rank_pattern": {"layers.1.self_attn.v_proj": 3, "down_proj": 5}}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def load_adapted(folder: Path, adapters: dict[str, Path], **options) -> Driver:
    """Return the model with these adapters in slots 0, 1, ..."""
    lora = LoRA(LoRAConfig(slots=len(adapters)), torch.device("cpu"), torch.float32)
    model = load_model(folder, adapters=lora, **options)
    lora.allocate()
    for slot, (name, path) in enumerate(adapters.items()):
        lora.read(name, path)
        lora.place(slot, name)
    return Driver(model)


def step(driver: Driver, rows: list[tuple[str, list[int]]], slots: dict[str, int], num_decode: int = 0):
    each = [slots.get(name, -1) for name, tokens in rows for _ in tokens]
    driver.model.build.adapters.slots_T = torch.tensor(each, dtype=torch.int32)
    try:
        return driver.step(rows, num_decode)
    finally:
        driver.model.build.adapters.slots_T = None


@pytest.mark.parametrize(
    ("variant", "family", "options"),
    [
        ("gqa", "llama", ({}, {"r": 16, "lora_alpha": 4, "use_rslora": True})),
        ("qwen2", "llama", ({"target_modules": ["q_proj", "v_proj"]}, {"layers_to_transform": [1]})),
        ("mha", "llama", (PATTERNS, {"alpha_pattern": {"o_proj": 40}})),
        ("falcon_40b", "falcon", ({}, {"r": 3})),
        ("falcon_7b", "falcon", ({}, {"target_modules": ["query_key_value"]})),
        ("gptj", "gptj", ({}, {"r": 1})),
    ],
)
def test_logits_equal_peft(variant, family, options, tmp_path):
    base = tmp_path / "base"
    reference = save_random(base, variant)
    folders = {name: tmp_path / name for name in ("first", "second")}
    for seed, (folder, own) in enumerate(zip(folders.values(), options, strict=True)):
        save_adapter(folder, reference, seed=seed, **{"target_modules": TARGETS[family], **own})
    slots = {name: slot for slot, name in enumerate(folders)}
    sequences = {name: random_tokens(n, seed=n) for name, n in (("first", 40), ("base", 23), ("second", 31))}

    driver = load_adapted(base, folders)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in sequences}
    # First all prompts in one step, then chunks mixed with decode rows.
    for start, stop, num_decode in ((0, 12, 0), (12, 17, 0), (17, 18, 3), (18, 23, 0)):
        rows = [(name, tokens[start:stop]) for name, tokens in sequences.items()]
        for (name, _), logits_TV in zip(rows, step(driver, rows, slots, num_decode), strict=True):
            found[name].append(logits_TV)

    plain = {name: reference_logits(reference, tokens[:23]) for name, tokens in sequences.items()}
    for name, tokens in sequences.items():
        expected = adapted_logits(reference, folders[name], tokens[:23]) if name in folders else plain[name]
        assert name not in folders or (expected - plain[name]).std() > 0.05  # the adapter must have an effect
        torch.testing.assert_close(torch.cat(found[name]), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("variant", "family", "size"), [("gqa", "llama", 4), ("falcon_40b", "falcon", 2), ("gptj", "gptj", 2)]
)
def test_ranks_together_equal_one(variant, family, size, tmp_path):
    base, folder = tmp_path / "base", tmp_path / "adapter"
    save_adapter(folder, save_random(base, variant), seed=0, target_modules=TARGETS[family])
    rows = [("base", random_tokens(9, seed=1)), ("adapter", random_tokens(20, seed=2))]

    def logits(**options):
        return torch.cat(step(load_adapted(base, {"adapter": folder}, **options), rows, {"adapter": 0}))

    expected = logits()
    for got in on_threads(size, lambda collective: logits(collective=collective)):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_with_a_quantizer_adapters_read_the_plain_activation(quant, tmp_path):
    """The adapter's contribution is as exact as without the quantizer."""
    from dovetail.core.testing.reference import build

    base, folder = tmp_path / "base", tmp_path / "adapter"
    save_adapter(folder, save_random(base, "gqa"), seed=0, r=16, lora_alpha=64)
    tokens = random_tokens(30, seed=2)

    def logits(slots: dict[str, int], **options) -> torch.Tensor:
        return step(load_adapted(base, {"adapter": folder}, **options), [("adapter", tokens)], slots)[0]

    exact = logits({"adapter": 0})
    quantized = logits({"adapter": 0}, quantizer=build("quant", quant))
    unadapted = logits({}, quantizer=build("quant", quant))
    error = (quantized - exact).norm() / exact.norm()
    assert error < 0.2 < 0.6 < (unadapted - exact).norm() / exact.norm()


def test_greedy_output_of_the_engine_equals_peft(tmp_path):
    """Run the whole engine on a model folder: two plans in flight, chunked prompts, several adapters for one slot."""
    from peft import PeftModel

    from dovetail import LLM, SamplingParams

    base = tmp_path / "base"
    reference = save_random(base, "gqa")
    names = ("first", "second")
    for seed, name in enumerate(names):
        save_adapter(tmp_path / name, reference, seed=seed)
    prompts = [random_tokens(n, seed=n) for n in (5, 70, 33)]
    overrides = ["engine.device=cpu", "engine.token_budget=24", "engine.depth=2", "adapter=lora", "adapter.slots=1"]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with LLM(
        str(base), overrides=[*overrides, *(f"+adapter.load.{name}='{tmp_path / name}'" for name in names)]
    ) as llm:
        found = {name: llm.generate(prompts, params, adapter=name) for name in names}
    for name in names:
        wrapped = PeftModel.from_pretrained(reference, tmp_path / name)
        for prompt, result in zip(prompts, found[name], strict=True):
            expected = wrapped.generate(
                input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=30, eos_token_id=None, pad_token_id=0
            )
            assert list(result.token_ids) == expected[0, len(prompt) :].tolist()
        wrapped.unload()
