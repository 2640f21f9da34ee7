"""Start-up finds the numbers of rows that bring further kernels, and runs steps for them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from dovetail.core.interfaces import Collective
from dovetail.core.ops.rehearsal import Rehearsal, StepLimits, WarmupStep, rehearsal, report_kernel
from dovetail.core.testing.rank_threads import on_threads
from dovetail.core.worker.connection import Connection
from dovetail.core.worker.warmup import agreed, agreed_steps, warmup_plan
from dovetail.plugins.attention.triton.latent_rehearsal import absorbed_steps, decoded_steps, expanded_steps

LIMITS = StepLimits(tokens=4096, rows=32, longest=1000)


def run(found: Rehearsal, step: WarmupStep) -> None:
    """Stand-in for a step: an operation on all tokens, one on half of them, and one on sampled rows."""
    found.begin(step)
    sampled = step.rows * (1 + step.drafts)
    report_kernel("all", step.tokens, lambda rows: ("all", rows > 37, 700 < rows <= 704, rows > 3000))
    report_kernel("half", step.tokens // 2, lambda rows: ("half", 1000 < rows <= 1088))
    report_kernel("sampled", sampled, lambda rows: ("sampled", 5 < rows < 9))


def test_steps_launch_each_kernel_of_a_rule() -> None:
    seen: set[int] = set()
    with rehearsal(LIMITS) as found:
        for step in (WarmupStep(4096, 5), WarmupStep(4096, 32), WarmupStep(64, 1)):
            run(found, step)
        while steps := found.missing():
            for step in steps:
                assert step.tokens <= 4096 and step.rows == -(-step.tokens // 1000)
                seen.add(step.tokens)
                run(found, step)
        (samples,) = found.missing_samples()
    assert any(n <= 37 for n in seen) and any(700 < n <= 704 for n in seen)
    assert any(1000 < n // 2 <= 1088 for n in seen)
    assert len(seen) <= 5, "one step for each kernel, and no more"
    assert 5 < samples < 9


def test_kernels_that_steps_have_launched_are_not_missing() -> None:
    with rehearsal(LIMITS) as found:
        found.begin(WarmupStep(64, 1))
        report_kernel("op", 64, lambda rows: rows > 32)
        found.begin(None)
        report_kernel("op", 8, lambda rows: rows > 32)
        assert found.missing() == []
        report_kernel("other", 8, lambda rows: rows > 3)
        assert found.missing() == [], "graphs alone run this one"


def test_shares_of_steps_with_drafts_do_not_mislead_steps_without() -> None:
    """A drafter may process more rows than its step has tokens."""
    with rehearsal(LIMITS) as found:
        for step, rows in ((WarmupStep(64, 1), 64), (WarmupStep(40, 4, drafts=4), 100)):
            found.begin(step)
            report_kernel("op", rows, lambda rows: 70 < rows < 90)
        (step,) = found.missing()
        assert 70 < step.tokens < 90


def test_logits_of_steps_that_verify_drafts_are_no_reason_for_steps_of_so_many_tokens() -> None:
    """The drafter has the same matrix of logits, and a row for each sequence."""
    with rehearsal(LIMITS) as found:
        for step, rows in (
            (WarmupStep(4096, 5), 5),
            (WarmupStep(40, 8, drafts=4), 40),
            (WarmupStep(40, 8, drafts=4), 8),
        ):
            found.begin(step)
            report_kernel("logits", rows, lambda rows: rows // 10)
            report_kernel("layer", step.tokens, lambda rows: 100 < rows < 200)
        (step,) = found.missing()
        assert 100 < step.tokens < 200
        assert {rows // 10 for rows in found.missing_samples()} == {1, 2, 3}


def test_requested_steps_run_once() -> None:
    with rehearsal(LIMITS) as found:
        found.steps[WarmupStep(10, 2)] = None
        assert found.missing() == [WarmupStep(10, 2)]
        found.begin(WarmupStep(10, 2))
        assert found.missing() == []
    report_kernel("op", 1, lambda rows: pytest.fail("nothing runs outside a rehearsal"))


def possible(limits: StepLimits, step: WarmupStep) -> bool:
    plan, _ = warmup_plan(step, [])
    fits = len(plan.rows) <= limits.rows and sum(row.count for row in plan.rows) <= limits.tokens
    return fits and all(0 < row.count <= row.bound <= limits.longest for row in plan.rows)


def test_latents_request_each_number_of_heads_and_each_tile() -> None:
    for limits in (StepLimits(8192, 256, 16383), StepLimits(512, 4, 300), StepLimits(64, 1, 50)):
        heads = [64, 32, 16, 8, 4, 2, 1]
        found = dict(expanded_steps(limits, 48, heads, lambda count: 4000 // count, lambda rows, tokens: tokens > 768))
        for (count, many), step in found.items():
            assert possible(limits, step) and step.tokens // step.rows >= 48 and (step.tokens > 768) is many
            pages = step.rows * -(-(step.cached + step.tokens // step.rows) // 64)
            assert max(each for each in heads if pages * each <= 4000) == count
        if limits.rows == 256:
            assert set(found) == set(product(heads, (False, True)))
        absorbed = dict(absorbed_steps(limits, 47, lambda rows, tokens: (rows > 1, tokens > 30)))
        assert all(possible(limits, step) and step.tokens // step.rows <= 47 for step in absorbed.values())
        assert len(absorbed) == (4 if limits.rows > 1 else 2)
        decoded = dict(decoded_steps(limits, lambda rows: rows > 8))
        assert all(possible(limits, step) and (step.decodes > 8) is many for many, step in decoded.items())
        assert len(decoded) == {256: 2, 4: 1, 1: 0}[limits.rows]
        assert not list(decoded_steps(limits, lambda rows: None))


def test_ranks_run_the_same_steps() -> None:
    """A rank with other experts may need other steps, and each makes collective calls."""
    mine = [[WarmupStep(64, 1), WarmupStep(300, 2, cached=5)], [WarmupStep(300, 2, cached=5), WarmupStep(9, 3)]]

    def agree(ranks: Collective) -> list[WarmupStep]:
        connection = Connection(ranks.rank, ranks.size, torch.device("cpu"), ranks)
        assert agreed([(ranks.rank,)], connection) == [(0,), (1,)]
        assert agreed_steps([], connection) == []
        return agreed_steps(mine[ranks.rank], connection)

    for found in on_threads(2, agree):
        assert found == [*mine[0], WarmupStep(9, 3)]


def random_steps(rng: random.Random, limits: StepLimits, count: int, lookahead: int) -> Iterator[WarmupStep]:
    for _ in range(count):
        rows = rng.randint(1, rng.choice((1, 3, limits.rows)))
        if lookahead and rng.random() < 0.5:
            drafts = rng.randint(1, lookahead)
            yield WarmupStep(rows * (1 + drafts), rows, rows, rng.randint(1, limits.longest - drafts), drafts)
            continue
        tokens = rng.randint(rows, min(limits.tokens, rows * rng.choice((2, 40, limits.longest // 2))))
        decodes = rng.choice((0, rng.randint(0, rows - 1)))
        cached = rng.choice((0, rng.randint(0, limits.longest - -(-(tokens - decodes) // (rows - decodes)))))
        yield WarmupStep(tokens, rows, decodes, rng.randint(1, limits.longest), cached=cached)


SIZES = [
    *("engine.device=cuda", "executor=inproc", "attention=triton", "model.load=dummy", "engine.kv_pages=1000"),
    *("engine.max_seqs=24", "engine.graph_tokens=0", "engine.token_budget=1024", "engine.max_len=1000"),
    *("engine.dtype=bfloat16", "engine.page_size=16", "cost=none"),
]
_HEAD = [
    *("spec_decode.hf.hidden_size=2048", "spec_decode.hf.num_attention_heads=32", "spec_decode.hf.head_dim=64"),
    *("spec_decode.hf.intermediate_size=512", "spec_decode.hf.draft_vocab_size=128256"),
]
MODELS = {
    "latents": ["model=small_mtp", "model.hf.kv_lora_rank=64", "engine.kv_dtype=fp8_e4m3"],
    "latents, rotated columns apart": [
        *("model=small_mtp", "engine.kv_dtype=fp8_e4m3", "model.hf.kv_lora_rank=256", "model.hf.qk_nope_head_dim=64"),
        *("model.hf.qk_rope_head_dim=32", "model.hf.v_head_dim=64"),
    ],
    "latents in 16 bits": ["model=small_mtp"],
    "drafts over latents": ["model=small_mtp", "spec_decode=mtp", "spec_decode.lookahead=4"],
    "trees over latents": ["model=small_mtp", "spec_decode=mtp", "spec_decode.lookahead=3", "spec_decode.tree=6"],
    "drafts": [
        *("model=llama32_1b", "model.hf.num_hidden_layers=2", "spec_decode=draft_model", "spec_decode.lookahead=5"),
        *("model@spec_decode.model=llama32_1b", "spec_decode.model.hf.num_hidden_layers=1"),
    ],
    "drafts of one pass": [
        *("model=llama32_1b", "model.hf.num_hidden_layers=8", "spec_decode=parallel_llama3_8b", *_HEAD),
    ],
    "trees of a feature drafter": [
        *("model=llama32_1b", "model.hf.num_hidden_layers=8", "spec_decode=eagle3_llama3_8b", *_HEAD),
        "spec_decode.tree=8",
    ],
    "experts": ["model=small_moe", "quant=fp8"],
    "packed experts": ["model=small_moe", "quant=w4a8"],
    "llama": ["model=qwen3_8b", "model.hf.num_hidden_layers=2", "quant=int8"],
    "weights that many rows round": ["model=qwen3_8b", "model.hf.num_hidden_layers=2", "quant=w4a8"],
    "blocks of unlike types": ["model=qwen3_8b", "model.hf.num_hidden_layers=2", "quant=gguf"],
    "adapters": ["model=qwen3_8b", "model.hf.num_hidden_layers=2", "quant=fp8", "adapter=lora"],
}
ALONE = ("adapters", "blocks of unlike types", "drafts", "drafts of one pass", "trees of a feature drafter")
"""Models of which general steps launch all kernels."""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's launcher",
)
@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_no_random_step_launches_a_kernel_that_start_up_did_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are recorded with all that selects a compiled kernel. The buffer is so small that few heads fit."""
    import triton

    from dovetail.core.compose import compose
    from dovetail.core.ops.kernels import launch
    from dovetail.core.testing.executor_scripts import quiet
    from dovetail.core.testing.no_gpu import no_gpu
    from dovetail.core.worker import warmup
    from dovetail.core.worker.loader import load_rank
    from dovetail.plugins.attention.triton import expanded

    monkeypatch.setattr(expanded, "ROOM_BYTES", 1 << 19)
    monkeypatch.setattr(launch, "keep_shared_memory", lambda device: None)
    alone: list[int] = []
    others = warmup._rehearse_others

    def count_before(parts, found):
        alone.append(len(compiled.variants))
        others(parts, found)
        assert found.missing() == [], "steps ran for kernels that they do not launch"

    monkeypatch.setattr(warmup, "_rehearse_others", count_before)
    limits = StepLimits(1024, 24, 999)
    with triton.knobs.compilation.scope(), no_gpu(machine_code=False) as compiled:
        rank = load_rank(compose([*SIZES, *MODELS[name]]), quiet)
        ready, lookahead = len(compiled.variants), rank.parts.drafter.lookahead
        for adapted in (True, False):
            warmup._run_steps(rank.parts, random_steps(random.Random(1), limits, 20, lookahead), adapted)
        assert list(compiled.variants)[ready:] == []
    assert ready > alone[0] or name in ALONE, "general steps launch fewer kernels, which this test would find"


def test_matmuls_report_their_rule_in_rehearsals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 24 tokens launches one of the kernels of FP8 weights in blocks; those of more tokens are missing."""
    matmul = importlib.import_module("dovetail.core.ops.matmul")  # The package has a function of this name.
    monkeypatch.setattr(matmul, "device_facts", lambda device: ("a GPU", 132, True, 227 << 10))
    shape = 24, 6144, 4096, "fp8_block", torch.device("cpu")
    tile = matmul._choose(*shape)
    with rehearsal(StepLimits(2048, 64, 4096)) as found:
        for tokens in (24, 2048):
            found.begin(WarmupStep(tokens, 1))
            matmul._choose(tokens, *shape[1:])
        assert matmul._choose(*shape) == tile
        assert len({matmul._choose(step.tokens, *shape[1:]) for step in found.missing()} - {tile}) >= 2
