"""A model split over ranks gives the same results as the whole model."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path

import pytest
import torch

from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import ExpertPlacement, Quantizer
from dovetail.core.testing.rank_threads import ThreadCollective, on_threads
from dovetail.plugins.collective.config import OrderedConfig
from dovetail.plugins.collective.ordered import OrderedCollective
from dovetail.plugins.experts.config import AllToAllConfig, WholeConfig
from dovetail.plugins.experts.everywhere import WholePlacement
from dovetail.plugins.experts.own_rows import AllToAllPlacement, GatherPlacement
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama
from dovetail.plugins.quant.config import FP8Config
from dovetail.plugins.quant.fp8.quantizer import FP8

from .checkpoints import random_tokens, save_random
from .driver import Driver, build_model, load_model


def logits_of(model, tokens: list[int]) -> torch.Tensor:
    driver = Driver(model)
    return torch.cat([*driver.step([("a", tokens[:-1])]), *driver.step([("a", tokens[-1:])], num_decode=1)])


TOKENS = random_tokens(50, seed=3)


FAMILIES = (
    *("gqa", "mistral_window", "qwen2_window", "qwen3", "gemma2", "gemma3", "glm4", "phi3_window"),
    *("falcon_7b", "falcon_40b", "falcon_1b", "gptj", "olmo3", "granite", "cohere2"),
    *("mixtral", "qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v2_lite", "deepseek_v3"),
)
"""A variant of each family and of each of its checkpoint layouts."""


@pytest.mark.parametrize(
    ("variant", "size"),
    [
        *((variant, 2) for variant in FAMILIES),
        *(
            (variant, 2)
            for variant in ("mqa", "biases", "tied", "olmo2", "qwen3_window_biases", "falcon_11b", "gptj_tied")
        ),
        *((variant, 4) for variant in ("gqa", "falcon_40b", "gptj", "olmo2")),
        ("mha", 8),
    ],
)
def test_ranks_together_equal_one(variant, size, tmp_path):
    """A vocabulary of 199 does not divide by 2. One kv head over 2 ranks, and two over 4, are replicated."""
    save_random(tmp_path, variant)
    expected = logits_of(load_model(tmp_path), TOKENS)
    for got in on_threads(size, lambda collective: logits_of(load_model(tmp_path, collective=collective), TOKENS)):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


class Dealt(WholePlacement):
    """Experts in turn; expert 0 is on every rank."""

    def layout(self, experts: int, rank: int, size: int) -> list[int]:
        return [*range(rank, experts, size), *([0] if rank else [])]


class FewGo(AllToAllPlacement):
    """The second round has most rows."""

    def __init__(self, config: WholeConfig) -> None:
        super().__init__(AllToAllConfig(capacity=0.3))


def placed(
    placement: type[ExpertPlacement],
    ep: int,
    ranks: ThreadCollective,
    folder: Path,
    quantizer: Quantizer | None = None,
) -> Llama:
    made = placement(WholeConfig())
    made.bind(ranks, ep)
    model = build_model(LlamaConfig(path=str(folder)), collective=ranks, placement=made, quantizer=quantizer)
    checkpoint = open_checkpoint(folder)
    model.check_checkpoint(checkpoint)
    model.load(checkpoint.open())
    return model


@pytest.mark.parametrize(
    ("variant", "placement", "size", "ep"),
    [
        ("glm4_moe", WholePlacement, 2, 2),
        ("qwen3_moe", WholePlacement, 4, 2),
        ("qwen3_moe", Dealt, 2, 2),
        ("gpt_oss", WholePlacement, 2, 2),
        ("qwen3_moe", GatherPlacement, 4, 2),
        ("glm4_moe", FewGo, 4, 2),
    ],
)
def test_experts_on_different_ranks_equal_one(variant, placement, size, ep, tmp_path):
    """A rank has its share of the experts only."""
    save_random(tmp_path, variant)
    expected = logits_of(load_model(tmp_path), TOKENS)

    def run(ranks: ThreadCollective) -> tuple[torch.Tensor, int]:
        model = placed(placement, ep, ranks, tmp_path)
        return logits_of(model, TOKENS), model.blocks[-1].mlp.experts.shape.experts

    for got, experts in on_threads(size, run):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
        assert experts <= 8 // ep + 1


@pytest.mark.parametrize("placement", (GatherPlacement, FewGo))
def test_encoded_rows_get_to_their_experts(placement, tmp_path):
    """FP8 rows travel with their scales: the result is that of whole experts with all rows on each rank."""
    save_random(tmp_path, "qwen3_moe")

    def run(ranks: ThreadCollective, chosen: type[ExpertPlacement]) -> torch.Tensor:
        return logits_of(placed(chosen, 2, ranks, tmp_path, FP8(FP8Config())), TOKENS)

    expected, *_ = on_threads(2, partial(run, chosen=WholePlacement))
    for got in on_threads(2, partial(run, chosen=placement)):
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("variant", ("gqa", "gemma3", "falcon_40b", "gptj"))
def test_a_sharded_residual_changes_nothing(variant, tmp_path):
    """Sums in rank order are bitwise equal on every rank. Steps have 49 rows and then one; falcon_40b has two norms."""
    save_random(tmp_path, variant)

    def run(ranks: ThreadCollective, address: str, shard_rows: int | None) -> list[torch.Tensor]:
        collective = OrderedCollective(OrderedConfig(timeout=60, shard_rows=shard_rows))
        collective.connect(ranks.rank, ranks.size, address, torch.device("cpu"))
        driver = Driver(load_model(tmp_path, collective=collective))
        found = driver.step([("a", TOKENS[:-1])], taps=(0,)) + list(driver.hidden.taps.values())
        found += driver.step([("a", TOKENS[-1:])], num_decode=1)
        ranks.barrier()
        collective.close()
        return found

    found = []
    for shard_rows in (None, 1):
        # The first address stays in use until its store is collected.
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        found.append(on_threads(2, partial(run, address=address, shard_rows=shard_rows)))
    replicated, sharded = found
    for expected, got in zip(replicated, sharded, strict=True):
        assert len(got) == 3 and all(map(torch.equal, got, expected))


def dummy(folder: Path, collective: ThreadCollective | None = None, seed: int = 5) -> torch.Tensor:
    model = build_model(LlamaConfig(path=str(folder), load="dummy"), collective=collective)
    model.init_dummy(seed)
    return logits_of(model, TOKENS)


@pytest.mark.parametrize("variant", FAMILIES)
def test_dummy_weights_are_one_model_on_any_layout(variant, tmp_path):
    save_random(tmp_path, variant)
    expected = dummy(tmp_path)
    assert expected.isfinite().all() and 0.01 < expected.std() < 10
    assert not torch.equal(expected, dummy(tmp_path, seed=6))
    for got in on_threads(2, lambda collective: dummy(tmp_path, collective)):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_ranks_that_do_not_divide_are_refused_with_options(tmp_path):
    save_random(tmp_path, "gqa")
    with pytest.raises(ConfigError, match=r"engine\.tp=3 .*8 query heads.*one of 1, 2, 4, 8"):
        on_threads(3, lambda collective: load_model(tmp_path, collective=collective))
