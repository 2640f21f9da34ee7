"""A draft model that is the target itself: each of its drafts is what the target draws, so all are accepted.

Any fault in its pages, positions or draws shows as a rejected draft.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.core.engine.drafting import Drafting
from dovetail.core.errors import CapabilityError, ConfigError
from dovetail.core.interfaces import Blobs, CatchUp, StepPlan, StepResult
from dovetail.core.testing.executor_scripts import SMALL_LLAMA
from dovetail.core.worker.drafts import Drafts
from dovetail.plugins.model import bundled

from ...catching_up import by_turns

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


def test_a_step_has_as_many_passes_as_a_row_has_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    propose = Drafts.propose

    def counted(self: Drafts, slots_B: torch.Tensor, most_B: torch.Tensor, k: int, **options: Any) -> None:
        asked.append((int(most_B.max()), k))
        propose(self, slots_B, most_B, k, **options)

    with LLM("tiny", overrides=[*BASE, SAME, "spec_decode.lookahead=5"]) as llm:
        monkeypatch.setattr(Drafts, "propose", counted)
        llm.engine.scheduler.draft_tokens = lambda seq, ctx: (ctx.step + seq.uid) % 4 + 2 * (ctx.step % 2)  # type: ignore[attr-defined]
        llm.generate(PROMPTS, PARAMS)
        counters = llm.engine.counters
    assert counters.accepted == counters.drafted > 50
    assert {most for most, _ in asked} >= {1, 2, 3, 4, 5} and all(k == most for most, k in asked)


def test_it_catches_up_after_steps_without_drafts() -> None:
    with LLM("tiny", overrides=[*BASE, SAME, "engine.depth=2"]) as llm:
        plain = range(6, 15)  # More tokens than one proposal feeds.
        llm.engine.scheduler.draft_tokens = lambda seq, ctx: 0 if ctx.step in plain else 4  # type: ignore[attr-defined]
        llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        counters = llm.engine.counters
    assert counters.accepted == counters.drafted > 50
    assert counters.drafted < 4 * (counters.decode_rows - len(PROMPTS) * len(plain)), (
        "rows that catch up have no drafts"
    )


LATE = ["kv_cache=radix", "engine.kv_pages=19", "engine.depth=4"]


@pytest.mark.parametrize("variant", [LATE, pytest.param(["engine.max_seqs=3"], marks=pytest.mark.nightly)])
def test_it_catches_up_after_prompts_that_it_did_not_follow(
    variant: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, prefixes that others computed with and without it, forks, preemption and reused slots. It drafts for no
    row before its pages are complete."""
    monkeypatch.setattr(Drafting, "_follow", lambda self, plan, sequences: setattr(plan, "follows", plan.step % 3 == 0))
    words = [*BASE, SAME, *variant, "engine.page_size=8", "engine.token_budget=17"]
    with LLM("tiny", overrides=words) as llm:
        lacking = 0
        submit = llm.engine.executor.submit

        def watched(plan: StepPlan, blobs: Blobs) -> None:
            nonlocal lacking
            lacking += sum(join.lacking for join in plan.joins)
            submit(plan, blobs)

        monkeypatch.setattr(llm.engine.executor, "submit", watched)
        # These rows end before their pages are complete.
        llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=1))
        for _ in range(2):
            llm.generate(PROMPTS, PARAMS)
        counters, preemptions = llm.engine.counters, llm.engine.scheduler.stats().preemptions
    assert counters.accepted == counters.drafted > 50 and lacking > 0
    assert (preemptions > 0) is (variant is LATE)


CHUNKS = [LATE, *(pytest.param([f"engine.depth={depth}"], marks=pytest.mark.nightly) for depth in (1, 2))]
CHUNKS.append(pytest.param(["engine.tp=2", "executor=multiproc", "engine.depth=2"], marks=pytest.mark.nightly))


@pytest.mark.parametrize("variant", CHUNKS)
def test_it_catches_up_by_chunks_within_the_token_budget(variant: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without drafts and prompts that it did not follow, among others those of shared prefixes, leave rows
    behind. Then chunks catch up, and each draft is that of a row which was never behind."""
    by_turns(monkeypatch)
    words = [*BASE, SAME, *variant, "cost=cpu", "engine.page_size=8", "engine.token_budget=23"]
    with LLM("tiny", overrides=words) as llm:
        chunks: list[CatchUp] = []
        submit, update = llm.engine.executor.submit, llm.engine.scheduler.update
        missed = 0

        def watched(plan: StepPlan, blobs: Blobs) -> None:
            assert plan.num_tokens + sum(chunk.count for chunk in plan.catch_up) <= 23
            chunks.extend(plan.catch_up)
            submit(plan, blobs)

        def counted(result: StepResult) -> None:
            nonlocal missed
            plan = llm.engine.scheduler._launched[0]  # type: ignore[attr-defined]
            missed += sum(1 for row, out in zip(plan.rows, result.rows, strict=True) if row.draft and not out.drafted)
            update(result)

        monkeypatch.setattr(llm.engine.executor, "submit", watched)
        monkeypatch.setattr(llm.engine.scheduler, "update", counted)
        for _ in range(2):
            llm.generate(PROMPTS, PARAMS)
        counters = llm.engine.counters
    assert counters.accepted == counters.drafted > 60 and len(chunks) > 5
    assert missed == 0, "rows that the host takes for caught up have drafts"


@pytest.mark.nightly
@pytest.mark.parametrize("variant", [["engine.depth=1"], ["engine.depth=2", "engine.max_seqs=3"], LATE])
def test_catching_up_changes_no_token(variant: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled pair, with preemption, reused slots and prefixes in the cache."""
    by_turns(monkeypatch)
    found = []
    for words in (["spec_decode=none"], ["cost=cpu", "engine.page_size=8", "engine.token_budget=23", *variant]):
        with LLM("tiny", overrides=[*BASE, *words]) as llm:
            found.append([[one.token_ids for one in llm.generate(PROMPTS, PARAMS)] for _ in range(2)])
    assert found[0] == found[1]


def resized(folder: Path, vocab: int, swapped: bool = False) -> list[str]:
    """Save the bundled draft model with another size of its vocabulary; return what chooses it. `swapped`: two tokens
    have each other's id."""
    source = Path(bundled.__file__).parent / "tiny_draft"
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab}))
    tensors = load_file(source / "model.safetensors")
    name = "model.embed_tokens.weight"
    rows = tensors[name][:vocab]
    tensors[name] = torch.cat((rows, rows.new_zeros(vocab - len(rows), rows.shape[1])))
    save_file(tensors, folder / "model.safetensors")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    if swapped:
        ids["if"], ids["or"] = ids["or"], ids["if"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    return ["model@spec_decode.model=llama", f"spec_decode.model.path={folder}"]


def test_sizes_of_the_vocabulary_may_differ(tmp_path: Path) -> None:
    """Rows of padding change no draft. A target may have tokens that the draft model lacks."""
    found = []
    for words in ([], resized(tmp_path / "more", 4100), resized(tmp_path / "fewer", 3000)):
        with LLM("tiny", overrides=[*BASE, *words]) as llm:
            texts = [generation.token_ids for generation in llm.generate(PROMPTS, PARAMS[0])]
            found.append((texts, llm.engine.counters.accepted))
    assert found[0] == found[1] and found[2][0] == found[0][0]
    assert 0 < found[2][1] < found[0][1]


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has another tokenizer than the model: token '(if|or)' is id"):
        LLM("tiny", overrides=[*BASE, *resized(tmp_path / "swapped", 4096, swapped=True)])


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({}, ConfigError, "has a vocabulary of 97 tokens, and the model one of 4096"),
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
