"""attention=triton compiled: bf16 and FP8, real tile sizes, a captured graph, the whole engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.core.interfaces import PLAIN
from dovetail.plugins.attention.config import TritonConfig

from .attention_cases import Case, error, expected, make_step

pytest.importorskip("triton")
from dovetail.plugins.attention.triton.backend import Triton

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GPU = torch.device("cuda")
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
MIXED = dict(lengths=(1500, 33, 4097, 800, 2061), counts=(1, 1, 1, 700, 513), num_decode=3, padding=5, heads=(32, 8))


def check(case: Case, tolerance: float = 6e-3) -> None:
    backend = Triton(TritonConfig())
    step = make_step(case, backend, GPU)
    got = backend.attend(step.layer, step.ctx, step.q_THD)[PLAIN].values
    assert error(got, expected(step)) < tolerance
    assert (got[sum(case.counts) :] == 0).all()


@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("page_tokens", [16, 64, 128])
def test_bfloat16(dim, page_tokens):
    check(Case(**MIXED, dim=dim, page_tokens=page_tokens, dtype=BF16))


@pytest.mark.parametrize("window", [1, 100, 1024])
@pytest.mark.parametrize("page_tokens", [16, 64])
def test_window(window, page_tokens):
    check(Case(**MIXED, dim=128, page_tokens=page_tokens, dtype=BF16, window=window))


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize("head_scales", [False, True])
def test_float8_pages(kv_dtype, page_tokens, head_scales):
    case = Case(**MIXED, dim=128, page_tokens=page_tokens, dtype=BF16, kv_dtype=kv_dtype, head_scales=head_scales)
    check(case, tolerance=4e-3)


@pytest.mark.parametrize("dim", [32, 80, 256])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_float8_head_dims(dim, dtype):
    check(Case(**MIXED, dim=dim, page_tokens=16, dtype=dtype, kv_dtype=E4M3), tolerance=4e-3)
    check(Case(lengths=(2000, 31), counts=(8, 3), num_decode=2, heads=(8, 1), dim=dim, dtype=dtype, kv_dtype=E5M2))


@pytest.mark.parametrize("heads", [(8, 8), (8, 1), (14, 2), (64, 1)])
def test_drafts_of_any_head_group(heads):
    case = dict(lengths=(2000, 31, 700), counts=(8, 1, 5), num_decode=3, heads=heads, dim=128, dtype=BF16)
    check(Case(**case))
    check(Case(**case, tree=True))


@pytest.mark.parametrize("page_tokens", [16, 128])
def test_long_prompt(page_tokens):
    check(Case(lengths=(8192,), counts=(8192,), heads=(4, 1), dim=128, page_tokens=page_tokens, dtype=BF16))
    check(Case(lengths=(20000,), counts=(100,), heads=(4, 1), dim=128, page_tokens=page_tokens, dtype=BF16))


def test_float32_stays_float32():
    check(Case(**MIXED, dim=128, dtype=torch.float32), tolerance=1e-5)


def test_one_graph_serves_other_lengths():
    """The graph is captured at capacity and replayed with fewer rows, other lengths and other queries."""
    capacity = Case(
        lengths=(3000, 3000, 3000, 900), counts=(1, 1, 1, 300), num_decode=3, heads=(8, 2), dim=128, dtype=BF16
    )
    backend = Triton(TritonConfig())
    step = make_step(capacity, backend, GPU)
    meta = step.ctx.meta

    def run():
        ctx = backend.plan_device(meta, step.ctx.host, backend.plan_host(step.ctx.host))
        return backend.attend(step.layer, ctx, step.q_THD)[PLAIN].values

    run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = run()
    for lengths, counts in (((2999, 17, 640, 555), (1, 1, 1, 120)), ((5, 1200, 9, 900), (1, 1, 0, 300))):
        step.case = Case(lengths, counts, heads=(8, 2), dim=128, dtype=BF16)
        meta.kv_len_B.copy_(torch.tensor(lengths, dtype=torch.int32))
        meta.row_start_B1.copy_(torch.tensor([sum(counts[:i]) for i in range(5)], dtype=torch.int32))
        step.q_THD.normal_()
        out.fill_(float("nan"))
        graph.replay()
        keys, values = ([x[:n] for x, n in zip(rows, lengths, strict=True)] for rows in (step.keys, step.values))
        assert error(out, expected(replace(step, keys=keys, values=values))) < 6e-3
        assert (out[sum(counts) :] == 0).all()


PROMPTS = ["def fibonacci(n):\n", "import os\n\nclass Path:\n    def __init__(self, ", "for i in range(10):\n    "]


def tokens(*overrides: str) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    with LLM("tiny", overrides=overrides) as llm:
        return [g.token_ids for g in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_engine_float32_equals_the_cpu(drafter):
    reference = tokens("engine.device=cpu", "engine.dtype=float32")
    got = tokens(
        "attention=triton",
        "engine.device=cuda",
        "engine.dtype=float32",
        "engine.depth=2",
        "engine.kv_pages=500",  # Test workers share the GPU.
        f"spec_decode={drafter}",
    )
    assert got == reference


def test_engine_bfloat16():
    reference = tokens("engine.device=cpu", "engine.dtype=float32")
    got = tokens(
        "attention=triton", "engine.device=cuda", "engine.dtype=bfloat16", "engine.page_size=64", "engine.kv_pages=200"
    )
    agree = sum(a == b for x, y in zip(got, reference, strict=True) for a, b in zip(x[:8], y[:8], strict=True))
    assert agree >= 0.75 * 8 * len(PROMPTS)
