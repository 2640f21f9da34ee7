"""The whole engine on a GPU against the CPU reference, with the bundled model."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from copy import copy

import pytest

from dovetail import LLM, Grammar, SamplingParams
from dovetail.core.worker.drafts import Drafts
from dovetail.core.worker.graphs import StepGraphs
from dovetail.core.worker.runner import Runner

from ..catching_up import by_turns

PROMPTS = [
    "def fibonacci(n):\n",
    "import os\n\nclass Path:\n    def __init__(self, ",
    "for i in range(10):\n    ",
    "def read_json(path):\n    with open(",
    "class Node:\n",
    '"""Return the',
]
FEW = "engine.kv_pages=500"
"""Lets tests share one GPU."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


def tokens(*overrides: str) -> list[list[int]]:
    with LLM("tiny", overrides=(FEW, *overrides)) as llm:
        return [g.token_ids for g in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    return tokens("engine.device=cpu", "engine.dtype=float32")


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model"])
def test_float32_tokens_equal_the_cpu_reference(reference: list[list[int]], depth: int, drafter: str) -> None:
    got = tokens("engine.device=cuda", "engine.dtype=float32", f"engine.depth={depth}", f"spec_decode={drafter}")
    assert got == reference


@pytest.mark.parametrize("graphs", ["true", "false"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model", "eagle"])
@pytest.mark.parametrize("depth", [1, 2])
def test_graphs_and_paged_kernels_give_the_reference_tokens(
    reference: list[list[int]], depth: int, drafter: str, graphs: str
) -> None:
    got = tokens(
        "engine.device=cuda",
        "engine.dtype=float32",
        "attention=triton",
        f"engine.cuda_graphs={graphs}",
        f"engine.depth={depth}",
        f"spec_decode={drafter}",
        "engine.max_seqs=12",
    )
    assert got == reference


@pytest.mark.parametrize("graphs", ["true", "false"])
@pytest.mark.parametrize("verify", ["draws", "rejection"])
@pytest.mark.parametrize("drafter", ["draft_model", "eagle3", "medusa"])
def test_fixed_trees_give_the_reference_tokens(
    reference: list[list[int]], drafter: str, verify: str, graphs: str
) -> None:
    """Beside a row that is not greedy, whose drafts are drawn and verified as `verify` says."""
    overrides = ["engine.device=cuda", "engine.dtype=float32", "attention=triton", "engine.depth=2"]
    overrides += [f"spec_decode={drafter}", "spec_decode.tree=10", "spec_decode.tree_shape=sequoia"]
    overrides += [f"spec_decode.verify={verify}", f"engine.cuda_graphs={graphs}", "engine.max_seqs=12", FEW]
    params = [GREEDY] * len(PROMPTS) + [SamplingParams(temperature=0.8, seed=1, max_tokens=60, ignore_eos=True)]
    with LLM("tiny", overrides=overrides) as llm:
        found = [generation.token_ids for generation in llm.generate([*PROMPTS, PROMPTS[0]], params)]
        assert llm.engine.counters.drafted > 100
    assert found[:-1] == reference and len(found[-1]) == 60


@pytest.mark.parametrize("budget", [24, 200])
def test_drafts_of_the_target_itself_are_accepted(budget: int) -> None:
    """Matmuls of other numbers of rows may round a close decision differently."""
    overrides = ["engine.device=cuda", "engine.dtype=float32", "attention=triton", "engine.depth=2", FEW]
    overrides += ["spec_decode=draft_model", "model@spec_decode.model=tiny", f"engine.token_budget={budget}"]
    with LLM("tiny", overrides=[*overrides, "engine.max_seqs=4"]) as llm:
        for temperature in (0.0, 0.8):
            llm.generate(PROMPTS, SamplingParams(temperature=temperature, seed=1, max_tokens=40, ignore_eos=True))
        counters = llm.engine.counters
    assert counters.drafted > 100 and counters.accepted > 0.97 * counters.drafted


@pytest.mark.parametrize("budget", [24, 200])
def test_drafts_after_catching_up_are_accepted(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a draft model that is the target itself run before graphs, beside decode rows and prompts."""
    by_turns(monkeypatch)
    overrides = ["engine.device=cuda", "engine.dtype=float32", "attention=triton", "engine.depth=2", FEW, "cost=h200"]
    overrides += ["spec_decode=draft_model", "model@spec_decode.model=tiny", f"engine.token_budget={budget}"]
    fed, catch_up = [], Drafts.catch_up

    def counted(self, chunks, chunks_N):  # type: ignore[no-untyped-def]
        fed.append(sum(chunk.count for chunk in chunks))
        catch_up(self, chunks, chunks_N)

    with LLM("tiny", overrides=[*overrides, "engine.max_seqs=4"]) as llm:
        monkeypatch.setattr(Drafts, "catch_up", counted)
        for temperature in (0.0, 0.8):
            llm.generate(PROMPTS, SamplingParams(temperature=temperature, seed=1, max_tokens=40, ignore_eos=True))
        counters = llm.engine.counters
    assert len(fed) > 5 and counters.drafted > 100 and counters.accepted > 0.97 * counters.drafted


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model", "eagle3", "medusa"])
@pytest.mark.parametrize("budget", [24, 200])
def test_graphs_of_mixed_steps_give_the_reference_tokens(
    reference: list[list[int]], drafter: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps have chunks and decode rows. The same prompts run twice, so that some begin in the cache."""
    overrides = [FEW, "engine.device=cuda", "engine.dtype=float32", "attention=triton", "engine.depth=2"]
    overrides += ["engine.max_seqs=4", f"engine.token_budget={budget}", f"spec_decode={drafter}"]
    picked, pick = [], StepGraphs.pick

    def counted(self, rows, adapted=False, **wanted):  # type: ignore[no-untyped-def]
        picked.append(graph := pick(self, rows, adapted, **wanted))
        return graph

    monkeypatch.setattr(StepGraphs, "pick", counted)
    with LLM("tiny", overrides=overrides) as llm:
        if drafter != "none":
            # The drafter follows the prompts of every other step.
            follow = lambda plan, sequences: setattr(plan, "follows", plan.step % 2 > 0)  # noqa: E731
            llm.engine.scheduler._drafting._follow = follow  # type: ignore[attr-defined]
        got = [[g.token_ids for g in llm.generate(PROMPTS, GREEDY)] for _ in range(2)]
    assert got == [reference] * 2
    assert None not in picked and sum(1 for graph in picked if graph.capacity.chunks) > 2


def test_a_graph_serves_sampling_and_penalties_too() -> None:
    params = [
        SamplingParams(temperature=0.8, seed=4, max_tokens=40, top_p=0.9, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=40, repetition_penalty=1.2),
        # These run alone at the end, so that captured draws serve them.
        SamplingParams(temperature=0.9, seed=5, max_tokens=80, top_k=30, top_p=0.9),
        SamplingParams(temperature=1.2, seed=6, max_tokens=80, min_p=0.05),
    ]
    got = []
    for graphs in ("true", "false"):
        overrides = ["engine.device=cuda", "attention=triton", "engine.dtype=float32", f"engine.cuda_graphs={graphs}"]
        with LLM("tiny", overrides=[FEW, *overrides, "engine.max_seqs=8"]) as llm:
            got.append([g.token_ids for g in llm.generate(PROMPTS[:4], params)])
    assert got[0] == got[1]


def test_chunks_and_preemption_change_nothing(reference: list[list[int]]) -> None:
    got = tokens(
        "engine.device=cuda",
        "engine.dtype=float32",
        "engine.depth=2",
        "engine.token_budget=16",
        "engine.kv_pages=14",
        "engine.max_len=128",
    )
    assert got == reference


def test_bfloat16_stays_close(reference: list[list[int]]) -> None:
    """16-bit near-ties fall either way, so tokens are not equal. But the first tokens mostly agree."""
    got = tokens("engine.device=cuda", "engine.dtype=bfloat16")
    agree = sum(
        a == b for ours, theirs in zip(got, reference, strict=True) for a, b in zip(ours[:8], theirs[:8], strict=True)
    )
    assert agree >= 0.8 * 8 * len(PROMPTS)


def test_int8_runs_on_the_gpu(reference: list[list[int]]) -> None:
    got = tokens("engine.device=cuda", "engine.dtype=bfloat16", "quant=int8")
    agree = sum(
        a == b for ours, theirs in zip(got, reference, strict=True) for a, b in zip(ours[:4], theirs[:4], strict=True)
    )
    assert agree >= 0.6 * 4 * len(PROMPTS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fp8_with_graphs_and_without(reference: list[list[int]], dtype: str) -> None:
    """Both have four rows, so that matmuls use the same tiles."""
    got = []
    for graphs in ("true", "false"):
        overrides = ["engine.device=cuda", "attention=triton", "quant=fp8", f"engine.dtype={dtype}"]
        with LLM("tiny", overrides=[FEW, *overrides, f"engine.cuda_graphs={graphs}", "engine.max_seqs=4"]) as llm:
            got.append([g.token_ids for g in llm.generate(PROMPTS[:4], GREEDY)])
    assert got[0] == got[1]
    pairs = zip(got[0], reference[:4], strict=True)
    agree = sum(a == b for ours, theirs in pairs for a, b in zip(ours[:4], theirs[:4], strict=True))
    assert agree >= 0.6 * 4 * 4


@pytest.mark.parametrize("quant", ["none", "fp8"])
@pytest.mark.parametrize("attention", ["sdpa", "triton"])
@pytest.mark.parametrize("budget", [8, 2048])
def test_no_step_waits_for_the_device(attention: str, quant: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run under torch's sync debug mode: a hidden synchronisation raises in the engine's thread. The small budget has
    mixed steps."""
    import torch

    overrides = [FEW, "engine.device=cuda", "engine.depth=2", f"attention={attention}", f"quant={quant}"]
    overrides += [f"engine.token_budget={budget}"]
    with LLM("tiny", overrides=overrides) as llm:
        llm.generate(PROMPTS, GREEDY)
        execute = Runner.execute

        def strict(self, plan, blobs):  # type: ignore[no-untyped-def]
            torch.cuda.set_sync_debug_mode("error" if not plan.joins else "default")
            try:
                execute(self, plan, blobs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(Runner, "execute", strict)
        llm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine.depth=1", "engine.cuda_graphs=false"],
        ["engine.depth=2"],
        ["engine.depth=2", "spec_decode=ngram"],
        ["engine.depth=4", "engine.mask_wait=0"],
    ],
)
def test_grammars(overrides: list[str]) -> None:
    """Rows with and without a grammar get the tokens of a CPU. Some rows sit out steps."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, grammar=grammar)
        for grammar in (None, Grammar(kind="regex", value="[a-z]{3,30}!"), Grammar(kind="json_schema", value=schema))
        for _ in range(2)
    ]
    got = []
    for device in (["engine.device=cpu"], ["engine.device=cuda", "attention=triton", *overrides]):
        with LLM("tiny", overrides=[FEW, "engine.dtype=float32", "engine.max_seqs=8", *device]) as llm:
            got.append([g.token_ids for g in llm.generate(PROMPTS, params)])
    assert got[0] == got[1]


def test_device_time_is_measured_with_events() -> None:
    """Work and idle time fill the time in which there are requests, and no more."""
    with LLM("tiny", overrides=(FEW, "engine.device=cuda", "attention=triton", "engine.depth=2")) as llm:
        llm.generate(PROMPTS, GREEDY)
        counters = llm.engine.counters
        before, began = copy(counters), time.perf_counter()
        llm.generate(PROMPTS, GREEDY)
        wall = time.perf_counter() - began
    worked, idle = (getattr(counters, f"{n}_seconds") - getattr(before, f"{n}_seconds") for n in ("device", "idle"))
    assert worked > 0 and idle >= 0 and 0.5 * wall < worked + idle <= wall


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("graphs", ["true", "false"])
def test_embeddings_during_generation_equal_those_of_a_cpu(pooling: str, graphs: str) -> None:
    """Some prompts end in chunks of one token, which are fed like decode rows. Other rows of the same steps sample."""
    prompts = [[7] + [i % 200 for i in range(n)] for n in (0, 15, 16, 40, 70)] * 3
    with LLM("tiny", overrides=(FEW, "engine.device=cpu", "engine.dtype=float32")) as llm:
        expected = llm.embed(prompts, pooling=pooling)
        outputs = [g.token_ids for g in llm.generate(PROMPTS, GREEDY)]
    settings = ("engine.device=cuda", "engine.dtype=float32", "attention=triton", "engine.token_budget=16")
    with LLM("tiny", overrides=(FEW, *settings, f"engine.cuda_graphs={graphs}", "engine.depth=2")) as llm:
        with ThreadPoolExecutor(1) as pool:
            embedded = pool.submit(llm.embed, prompts, pooling=pooling)
            assert [g.token_ids for g in llm.generate(PROMPTS, GREEDY)] == outputs
            assert abs(embedded.result() - expected).max() < 1e-3
