"""Medusa: its drafts are those of the published code, from files of the published layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dovetail.core.compose import Host, compose
from dovetail.core.engine.cost import bind_cost
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import FedTokens, Hidden
from dovetail.core.testing.draft_bench import Bench
from dovetail.core.testing.executor_scripts import small_composition
from dovetail.plugins.spec_decode.medusa_files import FILE

from .heads import HIDDEN, VOCAB, bound, medusa_tensors, save_head

K = "spec_decode.lookahead=3"


@pytest.mark.parametrize("own", [True, False], ids=["own head", "the target's head"])
def test_drafts_are_those_of_the_published_heads(own: bool, tmp_path: Path) -> None:
    fewer = {"medusa_num_heads": 2}  # As published: the file has more heads than config.json states.
    tensors = save_head(tmp_path / "head", "medusa", fewer, None if own else without_heads(), file=FILE)
    drafter = bound("medusa", tmp_path / "head", K)
    seen: dict[tuple[int, int], torch.Tensor] = {}
    observe = drafter.observe

    def kept(fed: FedTokens, hidden: Hidden) -> None:
        for slot, at, state_C in zip(fed.slots_T.tolist(), fed.ctx.positions_T.tolist(), hidden.states, strict=True):
            seen[slot, at] = state_C
        observe(fed, hidden)

    drafter.observe = kept
    bench = Bench(drafter, drafter.target)
    histories = {1: [3, 1, 4, 1, 5, 9, 2, 6, 5], 0: [2, 7]}
    bench.seat(histories, chunk=4)
    bench.state.temperature_S.fill_(0.0)
    for (slot, history), guesses in zip(histories.items(), bench.guess(), strict=True):
        expected = []
        for head in range(3):
            x = seen[slot, len(history) - 2]
            for layer in range(2):
                x = x + F.silu(F.linear(x, *(tensors[f"{head}.{layer}.linear.{kind}"] for kind in ("weight", "bias"))))
            logits_V = tensors[f"{head}.2.weight"] @ x if own else drafter.target.logits(x)
            expected.append(int(logits_V.argmax()))
        assert list(guesses.tokens) == expected


def without_heads() -> dict[str, Any]:
    """Return tensors to leave out."""
    return {f"{head}.2.weight": None for head in range(3)}


@pytest.mark.parametrize(
    ("config", "tensors", "words", "says"),
    [
        ({}, {}, ["spec_decode.lookahead=4"], "lookahead=4, and there are 3 heads, .* spec_decode.lookahead=3"),
        ({"hidden_size": 128}, {}, [K], "a hidden size of 128, and this model has 256"),
        ({"vocab_size": 32000}, {}, [K], "a vocabulary of 32000, and this model has 4096"),
        ({"medusa_num_heads": None}, {}, [K], "the key 'medusa_num_heads' is missing"),
        ({"medusa_num_heads": 0}, {}, [K], "medusa_num_heads is 0; it must be from 1"),
        ({}, {"1.2.weight": None}, [K], "1 missing .*1.2.weight"),
        ({}, {"2.2.weight": torch.zeros(32000, HIDDEN)}, [K], "2.2.weight. has shape .32000, 256"),
        ({"medusa_num_layers": 1}, {}, [K], "unexpected"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    config: dict[str, Any], tensors: dict[str, Any], words: list[str], says: str, tmp_path: Path
) -> None:
    save_head(tmp_path / "head", "medusa", config, tensors, file=FILE)
    with pytest.raises(ConfigError, match=says):
        bound("medusa", tmp_path / "head", *words)


def test_pickled_heads_are_refused(tmp_path: Path) -> None:
    save_head(tmp_path / "head", "medusa")
    (tmp_path / "head" / "model.safetensors").unlink()
    torch.save(medusa_tensors(), tmp_path / "head" / "medusa_lm_head.pt")
    with pytest.raises(ConfigError, match="pickled .medusa_lm_head.pt.*torch.load.'medusa_lm_head.pt'"):
        bound("medusa", tmp_path / "head", K)


@pytest.mark.parametrize("own", [True, False])
def test_its_size_is_planned(own: bool, tmp_path: Path) -> None:
    save_head(tmp_path / "head", "medusa", {"vocab_size": VOCAB}, None if own else without_heads())
    words = ["spec_decode=medusa", f"spec_decode.path={tmp_path / 'head'}", K, "quant@spec_decode.quant=fp8"]
    part = small_composition(*words).part("spec_decode")
    facts = part.facts()
    assert facts.spec.parameters.total == sum(t.numel() for t in medusa_tensors(own=own).values())
    assert (facts.lookahead, facts.weight_bits, facts.product, facts.spec.kv_bytes_per_token(2)) == (3, 8.0, "fp8", 0)
    assert part.capabilities(Host(device="cpu")).provides["drafts"] is True


def test_the_time_of_drafting_is_predicted() -> None:
    """A cost model counts one pass over all heads, which reads their matrices once."""
    words = ["app=plan", "cost=h200", "model=llama3_8b", "spec_decode=medusa_llama3_8b"]
    composition = compose([*words, "quant@spec_decode.quant=fp8"])
    cost = bind_cost(composition, composition.part("model").facts(), "cuda")
    assert cost is not None and cost.drafter is not None and cost.drafter.formats.product == "fp8"
    assert 1e-3 < cost.draft_seconds(1, 4, 1000) < 4 * cost.decode_seconds(1, 1000)
