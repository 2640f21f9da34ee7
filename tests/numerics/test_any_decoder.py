"""Decoders that no native family covers, by model=transformers: random weights, float32, against transformers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail import LLM, SamplingParams
from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.testing.model_driver import Driver, build_context
from dovetail.core.testing.rank_threads import on_threads
from dovetail.plugins.adapter.config import LoRAConfig
from dovetail.plugins.adapter.lora.adapters import LoRA
from dovetail.plugins.model.config import TransformersConfig

from .adapters import adapted_logits, save_adapter
from .decoders import CI, DECODERS, save_decoder

NIGHTLY = os.environ.get("DOVETAIL_DECODERS") == "all"
KINDS = list(DECODERS) if NIGHTLY else CI
OUTPUT = 48


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def load(folder: Path, **options: Any) -> Any:
    from dovetail.plugins.model.transformers.decoder import TransformersDecoder

    config = TransformersConfig(path=str(folder))
    model = TransformersDecoder(config, build_context(TransformersDecoder.spec(config), **options))
    model.load(open_checkpoint(folder).open())
    return model


@torch.no_grad()
def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].float()


def tokens_of(count: int) -> list[int]:
    return torch.randint(3, 96, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def check_tokens(reference: Any, prompts: list[list[int]], results: list[Any]) -> None:
    for prompt, result in zip(prompts, results, strict=True):
        logits = reference_logits(reference, prompt + list(result.token_ids))[len(prompt) - 1 : -1]
        assert list(result.token_ids) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_tokens_equal_transformers(kind, tmp_path):
    """Logits of a prompt in one step, and of its chunks beside a decode row. Then the engine: prompts in chunks mixed
    with decoding, two plans in flight, too few pages for all sequences, and once more with prefixes in the cache."""
    reference = save_decoder(tmp_path, kind)
    whole = tokens_of(70)
    expected = reference_logits(reference, whole)
    assert expected.std() > 0.3  # logits must not be so flat that any model would pass
    driver = Driver(load(tmp_path))
    (at_once,) = driver.step([("at once", whole)], slack=3, padding=2)
    (start,) = driver.step([("chunks", whole[:30])])
    both = driver.step([("at once", tokens_of(1)), ("chunks", whole[30:])], num_decode=1, slack=3)
    for found in (at_once, torch.cat((start, both[1]))):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)

    prompts = [tokens_of(count) for count in (5, 60, 31)]
    engine = [
        "engine.device=cpu",
        "engine.token_budget=24",
        "engine.depth=2",
        "engine.page_size=8",
        "engine.max_len=128",
    ]
    windowed = "sliding_window" in DECODERS[kind] and "layer_types" not in DECODERS[kind]
    # By name, since `model=auto` chooses the native model of families that have one.
    pages = f"engine.kv_pages={64 if windowed else 20}"
    with LLM("transformers", overrides=[f"model.path={tmp_path}", *engine, pages]) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        rounds = [llm.generate(prompts, params) for _ in range(2)]
        # If all layers have windows, a sequence needs few pages, and enough are left for prefixes.
        assert windowed or llm.engine.scheduler.stats().preemptions > 0
    assert sum(result.cached_tokens for result in rounds[1]) > 0
    for results in rounds:
        check_tokens(reference, prompts, results)


@pytest.mark.parametrize("kind", KINDS if NIGHTLY else ["gpt_neox", "qwen2_moe"])
def test_two_ranks_equal_one(kind, tmp_path):
    from dovetail.plugins.model.transformers.spec import decoder_of

    reference, tokens = save_decoder(tmp_path, kind), tokens_of(50)
    if 2 not in decoder_of(TransformersConfig(path=str(tmp_path))).ranks:
        pytest.skip("its class has no plan for two ranks")
    expected = reference_logits(reference, tokens)
    for found in on_threads(2, lambda ranks: Driver(load(tmp_path, collective=ranks)).step([("a", tokens)])[0]):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.skipif(not NIGHTLY, reason="DOVETAIL_DECODERS is not all")
@pytest.mark.parametrize("kind", ("gpt_neox", "cohere2", "afmoe"))
def test_greedy_tokens_of_two_processes(kind, tmp_path):
    reference, prompts = save_decoder(tmp_path, kind), [tokens_of(count) for count in (5, 60, 31)]
    ranks = ["engine.device=cpu", "executor=multiproc", "engine.tp=2", "engine.max_len=128", "engine.token_budget=24"]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    with LLM(str(tmp_path), overrides=[*ranks, "engine.kv_pages=20"]) as llm:
        check_tokens(reference, prompts, llm.generate(prompts, params))


def test_it_may_also_be_the_draft_model(tmp_path):
    """Its pages are beside those of the model that it drafts for."""
    reference = save_decoder(tmp_path / "model", "nanochat")
    save_decoder(tmp_path / "draft", "nanochat", seed=1)
    drafter = ["spec_decode=draft_model", f"spec_decode.model.path={tmp_path}/draft"]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = [tokens_of(count) for count in (5, 31)]
    with LLM(str(tmp_path / "model"), overrides=["engine.device=cpu", "engine.max_len=64", *drafter]) as llm:
        check_tokens(reference, prompts, llm.generate(prompts, params))


class Operations(TorchDispatchMode):
    """Count of operations that launch a kernel each on a GPU. A call of `engine` counts as one."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.inside = False

    def engine(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            self.count[name] += 1
            self.inside = True
            try:
                return call(*given, **named)
            finally:
                self.inside = False

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside and not func.is_view:
            self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_layer_takes_few_operations(tmp_path, monkeypatch):
    """The difference between steps of three layers and of two: q, k and v are one matmul whose output attention reads
    as it is, and the backend rotates q and k. Two of the products are Granite's factors."""
    from dovetail.core.layers import Linear, RMSNorm
    from dovetail.plugins.model.transformers.attention import PagedAttention

    found = []
    for layers in (2, 3):
        save_decoder(tmp_path / str(layers), "granite", num_hidden_layers=layers)
        driver, operations = Driver(load(tmp_path / str(layers))), Operations()
        with monkeypatch.context() as patch:
            patch.setattr(Linear, "_product", operations.engine("matmul", Linear._product))
            for owner, name in ((RMSNorm, "norm"), (PagedAttention, "attention")):
                patch.setattr(owner, "__call__", operations.engine(name, owner.__call__))
            with operations:
                driver.step([("a", tokens_of(9))])
        found.append(operations.count)
    assert found[1] - found[0] == {"matmul": 4, "norm": 2, "attention": 1, "add": 2, "silu": 1, "mul": 3}


def test_what_is_not_one_rotation_stays_the_librarys(tmp_path):
    """Layers of Command R rotate adjacent columns, of Phi a part of q and k that is cut out before."""
    rotated = {}
    for kind in ("gpt_neox", "cohere", "phi", "smollm3"):
        save_decoder(tmp_path / kind, kind)
        modules = load(tmp_path / kind).body.modules()
        rotated[kind] = [module.paged.rope is not None for module in modules if hasattr(module, "paged")]
    assert rotated == {"gpt_neox": [True] * 2, "cohere": [False] * 2, "phi": [False] * 2, "smollm3": [True, False]}


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("gpt_neox", ["query_key_value", "dense", "dense_4h_to_h"]), ("gpt2", ["c_attn", "c_proj"])],
)
def test_adapters_equal_peft(kind, targets, tmp_path):
    """GPT-2 stores matrices as [inputs, outputs], and PEFT says so of its adapters (fan_in_fan_out)."""
    reference, tokens = save_decoder(tmp_path / "base", kind), tokens_of(30)
    save_adapter(tmp_path / "own", reference, seed=1, target_modules=targets)
    lora = LoRA(LoRAConfig(slots=1), torch.device("cpu"), torch.float32)
    driver = Driver(load(tmp_path / "base", adapters=lora))
    lora.allocate()
    lora.read("own", tmp_path / "own")
    lora.place(0, "own")
    lora.slots_T = torch.zeros(len(tokens), dtype=torch.int32)
    (found,) = driver.step([("a", tokens)])
    expected = adapted_logits(reference, tmp_path / "own", tokens)
    assert (expected - reference_logits(reference, tokens)).std() > 0.05
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_old_names_and_unused_tensors(tmp_path):
    """The first GPT-2 checkpoints have no prefix, and hold masks."""
    reference, tokens = save_decoder(tmp_path, "gpt2"), tokens_of(9)
    whole = load(tmp_path)
    held = {name.removeprefix("transformer."): opener for name, opener in open_checkpoint(tmp_path).open()}
    assert "h.0.attn.c_attn.weight" in held
    mask = {f"h.{layer}.attn.bias": held["wte.weight"] for layer in (0, 1)}
    whole.load((held | mask).items())
    torch.testing.assert_close(
        Driver(whole).step([("a", tokens)])[0], reference_logits(reference, tokens), atol=1e-4, rtol=0
    )
