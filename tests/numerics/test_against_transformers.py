"""Every model family against transformers: random weights, float32, chunked prefill mixed with decode."""

from __future__ import annotations

import pytest
import torch

from dovetail import LLM, SamplingParams

from .checkpoints import (
    GEMMA,
    LEAST_GAP,
    SHAPE,
    VARIANTS,
    random_tokens,
    reference_logits,
    router_gap,
    save_random,
)
from .driver import Driver, load_model

TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def run_mixed(
    driver: Driver, sequences: dict[str, list[int]], prompts: dict[str, int], chunk: int
) -> dict[str, torch.Tensor]:
    """Return the logits of every token. Prompts are fed in chunks, two at a time, mixed with decoding sequences."""
    fed = dict.fromkeys(sequences, 0)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in sequences}
    while any(fed[name] < len(tokens) for name, tokens in sequences.items()):
        decode = [name for name in sequences if prompts[name] <= fed[name] < len(sequences[name])]
        prefill = [name for name in sequences if fed[name] < prompts[name]][:2]
        counts = [1] * len(decode) + [min(chunk, prompts[name] - fed[name]) for name in prefill]
        rows = [
            (name, sequences[name][fed[name] : fed[name] + count])
            for name, count in zip(decode + prefill, counts, strict=True)
        ]
        for (name, tokens), logits_TV in zip(rows, driver.step(rows, len(decode), slack=3, padding=2), strict=True):
            found[name].append(logits_TV)
            fed[name] += len(tokens)
    return {name: torch.cat(parts) for name, parts in found.items()}


COVERED = {"mha", "mistral", "linear_rope", "yarn_rope", "yarn_attention_factor", "qwen2_tied_yarn", "falcon_11b"}
COVERED |= {
    "qwen3_window_biases",
    "phi3_window",
    "glm",
    "gptj_tied",
    "qwen3_moe_scores",
    "glm4_moe_groups",
    "deepseek_v2",
}
"""Variants whose parts others have."""


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.nightly] * (name in COVERED)) for name in VARIANTS]
)
def test_logits_equal_transformers(variant, tmp_path):
    reference = save_random(tmp_path, variant)
    prompts = {"short": 11, "long": 230, "middle": 90}
    sequences = {name: random_tokens(n + 60, seed=n) for name, n in prompts.items()}

    found = run_mixed(Driver(load_model(tmp_path)), sequences, prompts, chunk=64)

    for name, tokens in sequences.items():
        assert router_gap(reference, tokens) > LEAST_GAP
        expected = reference_logits(reference, tokens)
        assert expected.std() > 0.5  # logits must not be so flat that any model would pass
        torch.testing.assert_close(found[name], expected, atol=TOLERANCE, rtol=0)
        assert torch.equal(found[name].argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(
    "variant",
    [
        *("gqa", "mistral_window", "gemma3", "falcon_40b", "gptj", "qwen3_moe", "deepseek_v3"),
        *(
            pytest.param(variant, marks=pytest.mark.nightly)
            for variant in (
                *("qwen2_window", "qwen3", "gemma2", "glm4", "phi3_window", "falcon_7b", "falcon_1b"),
                *("olmo3", "granite", "cohere2", "stablelm_parallel", "mixtral", "glm4_moe"),
            )
        ),
    ],
)
def test_greedy_output_of_the_engine_equals_transformers(variant, tmp_path):
    """Run the whole engine on a model folder: chunked prompts mixed with decoding, two plans in flight."""
    reference = save_random(tmp_path, variant)
    prompts = [random_tokens(n, seed=n) for n in (5, 130, 61)]
    overrides = ["engine.device=cpu", "engine.token_budget=48", "engine.depth=2", "engine.page_size=8"]
    with LLM(str(tmp_path), overrides=overrides) as llm:
        results = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    for prompt, result in zip(prompts, results, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=60, eos_token_id=None, pad_token_id=0
        )
        assert list(result.token_ids) == expected[0, len(prompt) :].tolist()
        assert router_gap(reference, expected[0].tolist()) > LEAST_GAP


def test_decode_rows_of_unequal_count(tmp_path):
    """Decode rows with drafts, of 4, 1 and 2 tokens. The host has only upper bounds of their lengths."""
    reference = save_random(tmp_path, "mistral_window")
    sequences = {name: random_tokens(n, seed=n) for name, n in (("a", 80), ("b", 21), ("c", 45))}
    driver = Driver(load_model(tmp_path))
    drafts = {"a": 4, "b": 1, "c": 2}
    driver.step([(name, tokens[: -drafts[name]]) for name, tokens in sequences.items()])

    rows = [(name, tokens[-drafts[name] :]) for name, tokens in sequences.items()]
    found = driver.step(rows, num_decode=3, slack=9)

    for (name, tokens), logits_TV in zip(rows, found, strict=True):
        expected = reference_logits(reference, sequences[name])[-len(tokens) :]
        torch.testing.assert_close(logits_TV, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", ["gqa", "gemma3", "olmo2", "granite"])
def test_taps_are_the_hidden_states_between_layers(variant, tmp_path):
    reference = save_random(tmp_path, variant)
    tokens = random_tokens(40, seed=2)
    driver = Driver(load_model(tmp_path))

    driver.step([("a", tokens)], taps=(0, 1))

    with torch.no_grad():
        expected = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    for layer in (0, 1):
        torch.testing.assert_close(driver.hidden.taps[layer], expected[layer + 1][0], atol=TOLERANCE, rtol=0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("variant", "pages", "kv_cache"), [("mistral_window", 14, "prefix_hash"), ("qwen2_window", 34, "paged")]
)
def test_a_window_slides_over_few_pages(variant, pages, kv_cache, tmp_path):
    """Prompts and outputs are many windows long, and only the window's pages fit; a second run uses the prefix cache.
    The tokens equal those of sequences run one at a time with enough pages."""
    save_random(tmp_path, variant)
    prompts = [random_tokens(n, seed=n) for n in (150, 40, 7, 90)]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    base = ["engine.device=cpu", "engine.page_size=8", "engine.max_len=256"]

    def run(*overrides):
        with LLM(str(tmp_path), overrides=[*base, *overrides]) as llm:
            rounds = [[g.token_ids for g in llm.generate(prompts, params)] for _ in range(2)]
            llm.engine.kv.check()
            return rounds

    few = [f"kv_cache={kv_cache}", f"engine.kv_pages={pages}", "engine.max_seqs=3"]
    found = run(*few, "engine.depth=2", "engine.token_budget=24")
    assert found == run("kv_cache=paged", "engine.max_seqs=1")


@pytest.mark.parametrize("published", [True, False])
def test_the_text_part_of_gemma_3(published, tmp_path):
    """Folders of Gemma 3 with images, as published and with the names of newer files."""
    import transformers
    from safetensors.torch import load_file, save_file

    text = {**SHAPE, **GEMMA, "sliding_window_pattern": 2, "tie_word_embeddings": True}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    torch.manual_seed(0)
    model_class = transformers.Gemma3ForConditionalGeneration
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if not published:
        tensors = {
            name.replace("language_model.model.", "model.language_model.").replace("vision", "model.vision", 1): value
            for name, value in tensors.items()
            if not name.startswith("multi")
        }
        save_file(tensors, file)
    assert any(name.startswith("language_model.model." if published else "model.language_model.") for name in tensors)
    tokens = random_tokens(90, seed=1)
    (logits_TV,) = Driver(load_model(tmp_path)).step([("a", tokens)])
    torch.testing.assert_close(logits_TV, reference_logits(model, tokens), atol=TOLERANCE, rtol=0)
