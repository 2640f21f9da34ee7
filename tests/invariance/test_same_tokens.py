"""Float32 tokens and logprobs do not depend on the selected parts, with greedy and with seeded sampling.

The reference runs one sequence at a time with one plan in flight. The variants change the scheduler, allocator, chunk
size, depth, batch size, number of pages (so that sequences are preempted), drafter, and the executor (so that plans run
late).
"""

from __future__ import annotations

import os

import pytest

from dovetail import LLM, Generation, SamplingParams

PREFIX = "import os\nimport sys\n\n\ndef main(argv=None):\n    "
PROMPTS = [
    "def fib(n):\n    if n < 2:\n        return n\n    return ",
    PREFIX + "parser = ",
    PREFIX + "for name in os.listdir(",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "x",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    print(j)\nfor k in ",
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=11, max_tokens=30, logprobs=2),
    SamplingParams(temperature=1.1, top_k=20, top_p=0.9, seed=12, max_tokens=30, n=2),
    SamplingParams(temperature=0.0, max_tokens=40, repetition_penalty=1.2, frequency_penalty=0.5, stop="\n\n"),
    SamplingParams(temperature=0.7, seed=13, max_tokens=25, min_tokens=5, logit_bias={5: -3.0}),
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, prompt_logprobs=1),
]
BASE = ["engine.device=cpu", "engine.dtype=float32", "engine.max_len=256"]
REFERENCE = ["scheduler=fcfs", "kv_cache=paged", "engine.max_seqs=1", "engine.depth=1", "spec_decode=none"]
VARIANTS = {
    "depth 4, results late": ["engine.depth=4", "executor.delay=3"],
    "small chunks, depth 4": ["scheduler.max_chunk=5", "engine.depth=4"],
    "preempted, paged, depth 4": ["engine.kv_pages=12", "engine.depth=4", "kv_cache=paged", "executor.delay=3"],
    "ngram, preempted, depth 2": ["spec_decode=ngram", "engine.kv_pages=12", "engine.depth=2"],
    "draft model, preempted, small chunks, depth 4": [
        *("spec_decode=draft_model", "spec_decode.lookahead=3", "engine.kv_pages=12", "scheduler.max_chunk=5"),
        *("engine.depth=4", "executor.delay=3"),
    ],
    "ngram where it pays, static, paged, large pages": [
        *("spec_decode=ngram", "cost=cpu", "scheduler=static", "kv_cache=paged", "engine.depth=4"),
        "engine.page_size=64",
    ],
}
if os.environ.get("DOVETAIL_GRID") == "pairs":
    # One change at a time, to isolate failures; the variants above combine them.
    VARIANTS |= {
        "batched": [],
        "preempted": ["engine.kv_pages=12", "engine.depth=2"],
        "large pages": ["engine.page_size=64"],
        "ngram, depth 4": ["spec_decode=ngram", "engine.depth=4", "spec_decode.lookahead=7", "executor.delay=2"],
        "depth 2": ["engine.depth=2"],
        "static": ["scheduler=static", "engine.depth=2"],
        "paged": ["kv_cache=paged", "engine.depth=2"],
        "small chunks": ["engine.token_budget=7"],
        "ngram": ["spec_decode=ngram"],
    }


def run(*overrides: str, params: list[SamplingParams] = PARAMS) -> list[Generation]:
    with LLM("tiny", overrides=[*BASE, *overrides]) as llm:
        first = llm.generate(PROMPTS, params)
        second = llm.generate(PROMPTS, params)  # Again, with the current contents of the prefix cache.
        llm.engine.kv.check()
        assert llm.engine.kv.stats().owned == 0
    assert [outputs(g) for g in first] == [outputs(g) for g in second], "the second run differs from the first"
    return first


def outputs(generation: Generation) -> list[tuple[list[int], str, str | None]]:
    return [(c.token_ids, c.text, c.finish_reason) for c in generation.completions]


@pytest.fixture(scope="module")
def reference() -> list[Generation]:
    return run(*REFERENCE)


BRIEF = {"depth 4, results late", "draft model, preempted, small chunks, depth 4", "small chunks, depth 4"}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(words, id=name, marks=[pytest.mark.nightly] * (name not in BRIEF))
        for name, words in VARIANTS.items()
    ],
)
def test_same_tokens(reference: list[Generation], overrides: list[str]) -> None:
    for ours, theirs in zip(run(*overrides), reference, strict=True):
        assert outputs(ours) == outputs(theirs)
        for a, b in zip(ours.completions, theirs.completions, strict=True):
            assert [lp.logprob for lp in a.logprobs] == pytest.approx([lp.logprob for lp in b.logprobs], abs=1e-4)
        assert [lp.logprob for lp in ours.prompt_logprobs] == pytest.approx(
            [lp.logprob for lp in theirs.prompt_logprobs], abs=1e-4
        )


def test_the_variants_do_what_their_names_say() -> None:
    """Guards against a grid that compares the reference with itself."""
    with LLM("tiny", overrides=[*BASE, *VARIANTS["ngram, preempted, depth 2"]]) as llm:
        llm.generate(PROMPTS, PARAMS)
        assert llm.engine.counters.accepted > 0
        assert llm.engine.scheduler.stats().preemptions > 0
    with LLM("tiny", overrides=BASE) as llm:
        llm.generate(PROMPTS[1], PARAMS[0])
        again = llm.generate(PROMPTS[2], PARAMS[0])
        assert again[0].cached_tokens >= 16, "the common prefix was computed twice"


@pytest.mark.parametrize("allocator", [pytest.param("prefix_hash", marks=pytest.mark.nightly), "radix"])
def test_evicted_prefixes_come_back_from_the_host(allocator: str) -> None:
    """Prompts alternate on a device that has room for only one of them."""
    turns, params = [PROMPTS[n] for n in (0, 1, 3, 0, 1, 0)], SamplingParams(temperature=0.0, max_tokens=12)

    def run(*overrides: str) -> tuple[list[list[int]], int, int]:
        with LLM("tiny", overrides=[*BASE, "engine.kv_pages=5", "engine.depth=2", *overrides]) as llm:
            found = [llm.generate(prompt, params)[0] for prompt in turns]
            llm.engine.kv.check()
            cached = sum(generation.cached_tokens for generation in found)
            return [generation.token_ids for generation in found], cached, llm.engine.kv.stats().loads

    plain, _, none = run("kv_cache=paged")
    _, few, _ = run(f"kv_cache={allocator}")
    found, cached, loads = run(f"kv_cache={allocator}", "kv_cache.host_pages=60")
    assert found == plain
    assert loads > none == 0
    assert cached > few
