"""Prefix caches on a GPU: copies to and from pinned host memory, and hits inside a page, with graphs."""

from __future__ import annotations

import pytest

from dovetail import LLM, Generation, SamplingParams

SHARED = "import os\nimport sys\n\n\ndef read_lines(path):\n    with open(path) as file:\n        return "
ENDS = ["file.readlines()\n", "[line.strip() for line in file]\n", "list(file)[1:]\n", "len(file.read())\n"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
BASE = ["engine.device=cuda", "engine.dtype=float32", "attention=triton", "engine.depth=2", "engine.max_len=128"]


def run(turns: list[str], *overrides: str) -> tuple[list[Generation], object]:
    """Run the prompts one after another, so that each can hit pages of earlier ones."""
    with LLM("tiny", overrides=[*BASE, *overrides]) as llm:
        found = [llm.generate(prompt, PARAMS)[0] for prompt in turns]
        llm.engine.kv.check()
        return found, llm.engine.kv.stats()


def assert_same(found: list[Generation], plain: list[Generation]) -> None:
    """Compare log-probabilities too: a slightly wrong page rarely changes greedy tokens."""
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        ours_N, theirs_N = ([entry.logprob for entry in g.completions[0].logprobs] for g in (ours, theirs))
        assert ours_N == pytest.approx(theirs_N, abs=1e-4)


@pytest.mark.parametrize("graphs", ["true", "false"])
@pytest.mark.parametrize("allocator", ["prefix_hash", "radix"])
def test_evicted_prefixes_come_back_from_pinned_memory(allocator: str, graphs: str) -> None:
    turns = [f"# {n}\n{SHARED}{ENDS[n]}" for n in (0, 1, 2, 3, 0, 1, 2, 3, 0)]
    few = ["engine.kv_pages=7", f"engine.cuda_graphs={graphs}"]
    plain, _ = run(turns, "kv_cache=paged", *few)
    found, stats = run(turns, f"kv_cache={allocator}", "kv_cache.host_pages=60", *few)
    assert_same(found, plain)
    assert stats.loads > 0 and stats.stores > 0  # type: ignore[attr-defined]
    assert any(generation.cached_tokens for generation in found)


@pytest.mark.parametrize("graphs", ["true", "false"])
def test_a_radix_hit_inside_a_page(graphs: str) -> None:
    turns = [SHARED + end for end in ENDS] * 2
    size = ["engine.page_size=16", "engine.kv_pages=500", f"engine.cuda_graphs={graphs}"]
    plain, _ = run(turns, "kv_cache=paged", *size)
    found, _ = run(turns, "kv_cache=radix", *size)
    assert_same(found, plain)
    assert any(generation.cached_tokens % 16 for generation in found), "every hit ended with a page"
