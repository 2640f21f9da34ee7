"""engine.ep and placements that do not fit are refused before anything is loaded, each with what would work."""

from __future__ import annotations

import pytest

from dovetail.core.compose import compose
from dovetail.core.engine.checks import check_fit
from dovetail.core.errors import CapabilityError, ConfigError, PluginError
from dovetail.plugins.experts.layout import Consecutive

RANKS = ("engine.device=cpu", "executor=multiproc", "engine.tp=4")

REFUSED = {
    "experts=whole engine.ep=3": r"engine\.ep=3 does not divide engine\.tp=4 ranks\. .*engine\.ep=1, .*=2, .*=4",
    "experts=tensor engine.ep=2": r"experts=tensor has every expert on each rank, .*engine\.ep=1, .*experts=whole",
    "experts=whole model=tiny": r"experts=whole requires model with expert_placement true .*experts=tensor",
    "engine.ep=2 model=tiny": r"engine\.ep=2 spreads experts, and LlamaForCausalLM has none",
    "experts=gather adapter=lora model=glm45_air": r"adapter=lora applies to all rows .*adapter=none, experts=whole",
    "experts=whole experts.redundant=3": r"experts\.redundant=3 copies.*Set experts\.redundant to 0 or 4",
    "experts=gather experts.redundant=52": r"must be at most 48",
    "experts=whole engine.ep=1 experts.redundant=2": r"engine\.ep=1\. Set experts\.redundant=0",
    "experts=whole engine.ep=1 experts.rebalance=9": r"and engine\.ep=1\. Would work: experts\.rebalance=0",
    "experts=whole model.hf.num_experts=6": r"not divide the model's 6 experts\. .* engine\.ep=1, 2 would",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_fit_is_refused(words: str) -> None:
    chosen = words.split()
    model = [] if any(word.startswith("model=") for word in chosen) else ["model=small_moe"]
    with pytest.raises((CapabilityError, ConfigError), match=REFUSED[words]):
        check_fit(compose([*RANKS, *model, *chosen], app="generate"))


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (lambda *_: 1 // 0, "experts=whole cannot lay out 16 experts on 4 ranks: ZeroDivisionError"),
        (lambda *_: ["0"], r"experts=whole: layout\(16, 0, 4\) has '0', which is no expert's number"),
        (lambda experts, *_: [experts], r"layout\(16, 0, 4\) has 16, which is no"),
    ],
)
def test_a_layout_of_other_experts_names_the_placement(layout, says, monkeypatch) -> None:
    monkeypatch.setattr(Consecutive, "layout", lambda self, *numbers: layout(*numbers))
    with pytest.raises(PluginError, match=says):
        check_fit(compose([*RANKS, "model=small_moe", "experts=whole"], app="generate"))


@pytest.mark.parametrize(
    "words",
    [
        "experts=whole",
        "experts=whole engine.ep=2",
        "experts=tensor engine.ep=1",
        "experts=whole experts.redundant=48 experts.rebalance=1",
        "experts=gather model.hf.num_experts=6 experts.redundant=2",
    ],
)
def test_what_fits_is_accepted(words: str) -> None:
    check_fit(compose([*RANKS, "model=small_moe", *words.split()], app="generate"))
