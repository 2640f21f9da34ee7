"""Numbers of rows and tokens for which steps have graphs."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.compose import compose
from dovetail.core.interfaces.model import MLA
from dovetail.core.interfaces.plan import StepShape
from dovetail.core.worker.graph_sizes import MOST_PAIRS, PairLimit, batch_sizes, ragged_sizes, token_sizes
from dovetail.core.worker.loader import _graph_tokens


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 300, 512, 1000])
def test_few_rows_are_padding(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert (size - rows) / size < (1 / 3 if rows > 8 else 2 / 5), (rows, size)
        assert size <= 128 or size % 32 == 0 or size == most


def test_padding_tokens_fill_no_additional_tile() -> None:
    assert token_sizes(0) == [] and token_sizes(100) == [16, 32, 64, 100]
    sizes = token_sizes(4096)
    assert sizes == sorted(set(sizes)) and sizes[-1] == 4096
    assert len(sizes) == 30, "each is captured at start-up"
    for tokens in range(1, 4097):
        size = next(size for size in sizes if size >= tokens)
        tile = 256 if tokens > 2048 else 128 if tokens > 512 else 64
        assert -(-size // tile) == -(-tokens // tile), (tokens, size)


@pytest.mark.parametrize(
    ("overrides", "most"),
    [
        ("+preset=h200_fp8_tp1 model=llama32_1b", 4096),
        ("+preset=h200_fp8_tp1 model=llama2_13b", 3072),
        ("+preset=h200_fp8_tp1 model=llama3_70b", 2048),
        ("+preset=h200_fp8_moe_tp1 model=qwen3_30b_a3b", 4096),
        # Latents are expanded without a graph alone, so no more steps are graphs than launches take time for.
        ("+preset=h200_fp8_v3_rank", 1536),
        ("+preset=h200_fp8_moe_tp1 model=deepseek_v2_lite", 4096),
        ("+preset=h200_fp8_tp4 engine.overlap_tokens=0", 4096),
        ("+preset=h200_fp8_tp4 engine.overlap_tokens=4096", 3840),
        ("+preset=h200_fp8_tp4 engine.overlap_tokens=1000", 2048),
        ("+preset=h200_fp8_tp1 model=llama32_1b engine.token_budget=512", 512),
        ("+preset=h200_fp8_tp1 model=llama3_70b engine.graph_tokens=8000", 8000),
        ("+preset=h200_fp8_tp1 engine.graph_tokens=0", 0),
        # It captures decode steps alone.
        ("+preset=h200_bf16_tp1 attention=sdpa", 0),
    ],
)
def test_steps_that_launch_longer_than_they_run_are_graphs(overrides: str, most: int) -> None:
    composition = compose(overrides.split())
    part = composition.part("model")
    assert _graph_tokens(composition, part.facts() or part.target().spec(part.config), torch.device("cuda")) == most


def test_chunks_that_would_be_expanded_run_without_a_graph_if_their_contexts_are_long() -> None:
    """128 heads, as DeepSeek-V3 has them. Rows of fewer than 171 tokens are absorbed in either case."""
    v3 = MLA(q_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, v_dim=128)

    def better_off(heads: int, chunks: int, count: int, keys: int, decodes: int = 0) -> bool:
        tokens, pairs = chunks * count + decodes, chunks * count * keys
        return PairLimit(v3, heads)(StepShape(tokens, decodes, chunks, 1, pairs, 0))

    assert not better_off(128, 1, 1000, 1000) and better_off(128, 1, 1500, 1500)
    assert not better_off(128, 2, 500, 500, decodes=200) and better_off(128, 2, 500, 5000, decodes=200)
    assert not better_off(128, 1, 160, 16_000) and better_off(128, 1, 180, 16_000)
    assert not better_off(16, 1, 2048, 3000) and better_off(16, 1, 2048, 4096)
    assert PairLimit()(StepShape(64, 0, 1, 1, MOST_PAIRS + 1, 0))
    assert not PairLimit()(StepShape(2048, 0, 1, 1, MOST_PAIRS, 0)), "no latents: as many as ever"
    assert not PairLimit(v3, 128)(StepShape(9, 9, 0, 1, 0, 0)), "decode rows alone"


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(("most", "lookahead"), [(1, 4), (5, 4), (100, 2), (256, 4), (256, 16)])
def test_ragged_steps_have_little_padding(most: int, lookahead: int, few: bool) -> None:
    """In a step with more drafts than the largest such graph serves, all rows are padded to all drafts."""
    sizes = [*ragged_sizes(most, lookahead, few=few), most * (1 + lookahead)]
    assert sizes == sorted(set(sizes)) and len(sizes) < 23
    for tokens in range(12, sizes[-1] + 1):
        size = next(size for size in sizes if size >= tokens)
        assert size - tokens <= size / 3, (tokens, size)
