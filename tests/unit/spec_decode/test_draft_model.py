"""A draft model that is the target itself: each of its drafts is what the target draws, so all are accepted.

Any fault in its pages, positions or draws shows as a rejected draft.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dovetail import LLM, SamplingParams
from dovetail.core.errors import CapabilityError, ConfigError
from dovetail.core.testing.executor_scripts import SMALL_LLAMA

BASE = ["engine.device=cpu", "engine.dtype=float32", "engine.max_len=160", "spec_decode=draft_model"]
SAME = "model@spec_decode.model=tiny"
PREFIX = "import os\nimport sys\n\n\ndef main(argv=None):\n    "
PROMPTS = [PREFIX + "parser = ", PREFIX + "for name in os.listdir(", "class Stack:\n    def __init__(self", "x"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=22, ignore_eos=True, n=2),
    SamplingParams(temperature=1.0, seed=4, top_p=0.9, top_k=50, max_tokens=23, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=5, min_p=0.05, max_tokens=20, ignore_eos=True),
]
VARIANTS = {
    "small chunks": ["engine.token_budget=17", "engine.max_seqs=3"],
    "preempted, depth 4, results late": ["engine.kv_pages=9", "engine.depth=4", "executor.delay=3"],
    "radix, large pages, depth 2": ["kv_cache=radix", "engine.page_size=64", "engine.depth=2"],
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("tiny", overrides=[*BASE, SAME, *request.param]) as llm:
        yield llm


def test_every_draft_is_accepted(llm: LLM) -> None:
    """The second round finds the prompts in the prefix cache, drafts included."""
    for _ in range(2):
        llm.generate(PROMPTS, PARAMS)
    counters = llm.engine.counters
    assert counters.accepted == counters.drafted > 150
    assert llm.engine.kv.stats().owned == 0
    pages = llm.engine.composition.engine.kv_pages
    assert pages is None or llm.engine.scheduler.stats().preemptions > 0


def test_it_catches_up_after_steps_without_drafts() -> None:
    with LLM("tiny", overrides=[*BASE, SAME, "engine.depth=2"]) as llm:
        plain = range(6, 15)  # More tokens than one proposal feeds.
        llm.engine.scheduler.draft_tokens = lambda seq, ctx: 0 if ctx.step in plain else 4  # type: ignore[attr-defined]
        llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        counters = llm.engine.counters
    assert counters.accepted == counters.drafted > 100
    assert counters.drafted < 4 * (counters.decode_rows - len(PROMPTS) * len(plain)), (
        "rows that catch up have no drafts"
    )


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        (
            {},
            CapabilityError,
            "requires model with vocab 97 .its draft model has this vocabulary.; the checkpoint has 4096",
        ),
        ({"vocab_size: 97": "vocab_size: 4096"}, ConfigError, "has a context of 128 tokens, .*set engine.max_len=128"),
        (
            {"vocab_size: 97": "vocab_size: 4096, sliding_window: 32", "LlamaFor": "MistralFor"},
            CapabilityError,
            "lacks a draft model without attention windows",
        ),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(changed: dict[str, str], error: type[Exception], says: str) -> None:
    hf = SMALL_LLAMA
    for old, new in changed.items():
        hf = hf.replace(old, new)
    words = ["model@spec_decode.model=llama", "spec_decode.model.load=dummy", f"spec_decode.model.hf={hf}"]
    with pytest.raises(error, match=says):
        LLM("tiny", overrides=[*BASE, *words])
