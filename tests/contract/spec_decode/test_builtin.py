"""Contract suite for every built-in drafter, and the engine's side of the contract."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.core.compose import Selected
from dovetail.core.engine.checks import check_fit
from dovetail.core.engine.host_drafts import host_drafts
from dovetail.core.errors import PluginError
from dovetail.core.interfaces import (
    AcceptedPath,
    Draft,
    DraftContext,
    Drafter,
    FedTokens,
    Hidden,
    Join,
    KVGroup,
    Row,
    RowFlag,
    StepResult,
    TargetView,
)
from dovetail.core.testing.executor_scripts import SMALL_LLAMA, VOCAB, Script, prompt, quiet, small_composition
from dovetail.core.testing.spec_decode import DrafterContract
from dovetail.core.worker.loader import load_rank
from dovetail.core.worker.runner import Runner
from dovetail.plugins.spec_decode.config import NgramConfig, NoneConfig, SuffixConfig
from dovetail.plugins.spec_decode.draft_model import DraftModel
from dovetail.plugins.spec_decode.eagle import Eagle
from dovetail.plugins.spec_decode.eagle_files import TAPS
from dovetail.plugins.spec_decode.ngram import NgramDrafter
from dovetail.plugins.spec_decode.none import NoDrafter
from dovetail.plugins.spec_decode.suffix import SuffixDrafter

from ..faults import rejects, suite, variant


class TestNone(DrafterContract):
    def make(self) -> Drafter:
        return NoDrafter(NoneConfig())


class TestNgram(DrafterContract):
    def make(self) -> Drafter:
        return NgramDrafter(NgramConfig())


@pytest.mark.nightly
class TestNgramOfOneToken(DrafterContract):
    def make(self) -> Drafter:
        return NgramDrafter(NgramConfig(lookahead=1, min_match=1, max_match=1))


class TestSuffix(DrafterContract):
    def make(self) -> Drafter:
        return SuffixDrafter(SuffixConfig())


@pytest.mark.nightly
class TestSuffixOfFewDrafts(DrafterContract):
    def make(self) -> Drafter:
        return SuffixDrafter(SuffixConfig(lookahead=3, growth=0.5, max_match=16))


class TestNgramFarAhead(DrafterContract):
    def make(self) -> Drafter:
        return NgramDrafter(NgramConfig(lookahead=9, min_match=3, max_match=3))


@cache
def draft_model(*words: str) -> Selected:
    model = ["model@spec_decode.model=llama", "spec_decode.model.load=dummy", f"spec_decode.model.hf={SMALL_LLAMA}"]
    return small_composition("spec_decode=draft_model", *model, *words).part("spec_decode")


class TestDraftModel(DrafterContract):
    vocab, slots = VOCAB, 3

    def make(self) -> Drafter:
        return draft_model("spec_decode.lookahead=3").build()


class TestDraftModelByRejection(DrafterContract):
    vocab, slots = VOCAB, 2

    def make(self) -> Drafter:
        return draft_model("spec_decode.lookahead=2", "spec_decode.verify=rejection").build()


@pytest.mark.skipif(os.environ.get("DOVETAIL_GRID") != "pairs", reason="grown like EAGLE's: DOVETAIL_GRID=pairs")
class TestTreeOfADraftModel(DrafterContract):
    vocab, slots = VOCAB, 2

    def make(self) -> Drafter:
        return draft_model("spec_decode.lookahead=3", "spec_decode.tree=6").build()


@pytest.mark.nightly
class TestFixedTreeByRejection(DrafterContract):
    vocab, slots = VOCAB, 2

    def make(self) -> Drafter:
        fixed = "spec_decode.tree=6", "spec_decode.tree_shape=sequoia", "spec_decode.verify=rejection"
        return draft_model("spec_decode.lookahead=3", *fixed).build()


class IgnoresJoins(DraftModel):
    def join(self, slots_J: torch.Tensor, computed_J: torch.Tensor) -> None: ...


def test_a_draft_model_that_ignores_joins_is_rejected() -> None:
    made = suite(TestDraftModel, make=lambda self: IgnoresJoins(draft_model("spec_decode.lookahead=3").config))
    assert rejects(made, "test_pages_of_a_shared_prefix_serve_as_its_own")


class CountsWhatItDidNotFollow(DraftModel):
    def observe(self, fed: FedTokens, hidden: Hidden) -> None:
        super().observe(fed, hidden)
        self.pages.fed(fed)


def test_a_draft_model_that_counts_prompts_without_feeding_them_is_rejected() -> None:
    config = draft_model("spec_decode.lookahead=3").config
    made = suite(TestDraftModel, make=lambda self: CountsWhatItDidNotFollow(config))
    assert rejects(made, "test_a_prompt_that_it_does_not_follow_leaves_rows_behind")


class CountsMeaninglessTokens(DraftModel):
    def catch_up(self, fed: FedTokens, lengths_B: torch.Tensor) -> None:
        super().catch_up(fed, fed.kv_len_B.long())


class CountsWithoutFeeding(DraftModel):
    def catch_up(self, fed: FedTokens, lengths_B: torch.Tensor) -> None:
        self.pages.fed(fed, lengths_B)


@pytest.mark.parametrize("kind", [CountsMeaninglessTokens, CountsWithoutFeeding])
def test_a_draft_model_that_does_not_catch_up_is_rejected(kind: type[DraftModel]) -> None:
    # Its probabilities show what changes no draft.
    config = draft_model("spec_decode.lookahead=2", "spec_decode.verify=rejection").config
    assert rejects(suite(TestDraftModelByRejection, make=lambda self: kind(config)), "test_rows_catch_up_by_chunks")


EAGLE_SHAPE = (
    "{hidden_size: 8, intermediate_size: 16, num_attention_heads: 2, num_key_value_heads: 1, vocab_size: 8, "
    "max_position_embeddings: 64, rms_norm_eps: 1.0e-5"
)


@cache
def eagle(name: str, more: str = "", *options: str) -> Selected:
    words = [f"spec_decode={name}", "spec_decode.load=dummy", f"spec_decode.hf={EAGLE_SHAPE}{more}}}"]
    return small_composition(*words, "spec_decode.lookahead=3", *options).part("spec_decode")


def loud(drafter: Any) -> Any:
    """Multiply random weights, whose drafts would else hardly depend on features."""
    bind = drafter.bind

    def bind_loudly(target: TargetView) -> None:
        bind(target)
        for linear in drafter.layer.linears():
            linear.params["weight"].mul_(20)

    drafter.bind = bind_loudly
    return drafter


@pytest.mark.nightly
class TestEagle(DrafterContract):
    slots = 3

    def make(self) -> Drafter:
        return loud(eagle("eagle").build())


class TestEagle3(DrafterContract):
    slots = 3

    def make(self) -> Drafter:
        return loud(eagle("eagle3", f", draft_vocab_size: 6, {TAPS}: [1, 2, 2]").build())


class TestParallel(DrafterContract):
    slots = 3

    def make(self) -> Drafter:
        return loud(eagle("parallel", f", ptd_token_id: 3, draft_vocab_size: 6, {TAPS}: [1, 2, 2]").build())


class TestTreeOfEagle(DrafterContract):
    slots = 3

    def make(self) -> Drafter:
        return loud(eagle("eagle", "", "spec_decode.tree=9", "spec_decode.width=4").build())


@pytest.mark.skipif(os.environ.get("DOVETAIL_GRID") != "pairs", reason="grown like EAGLE's: DOVETAIL_GRID=pairs")
class TestTreeOfMedusa(DrafterContract):
    slots = 3

    def make(self) -> Drafter:
        return loud(medusa("medusa_num_layers: 2", "spec_decode.tree=7").build())


@pytest.mark.nightly
class TestFixedTreeOfMedusaByRejection(DrafterContract):
    slots = 3

    def make(self) -> Drafter:
        fixed = "spec_decode.tree=7", "spec_decode.tree_shape=sequoia", "spec_decode.verify=rejection"
        return loud(medusa("medusa_num_layers: 2", *fixed).build())


@pytest.mark.nightly
class TestFixedTreeOfEagle(DrafterContract):
    slots = 3

    def make(self) -> Drafter:
        return loud(eagle("eagle", "", "spec_decode.tree=9", "spec_decode.tree_shape=sequoia").build())


class LeavesFeatures(Eagle):
    def keep(self, path: AcceptedPath) -> None: ...


def test_an_eagle_that_leaves_features_where_they_were_is_rejected() -> None:
    config = eagle("eagle", "", "spec_decode.tree=9", "spec_decode.width=4").config
    made = suite(TestTreeOfEagle, make=lambda self: loud(LeavesFeatures(config)))
    assert rejects(made, "test_accepted_drafts_count_as_known_tokens")


class TestMedusa(DrafterContract):
    def make(self) -> Drafter:
        return loud(medusa("medusa_num_layers: 2").build())


@pytest.mark.nightly
class TestMedusaWithTheTargetsHead(DrafterContract):
    slots = 3

    def make(self) -> Drafter:
        return loud(medusa("medusa_shared_head: true").build())


@cache
def medusa(more: str, *options: str) -> Selected:
    hf = f"spec_decode.hf={{medusa_num_heads: 3, {more}}}"
    words = ["spec_decode=medusa", "spec_decode.load=dummy", hf, "spec_decode.lookahead=3", *options]
    return small_composition(*words).part("spec_decode")


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        # After a prefix hit it lacks the feature of the last cached token.
        ({"follows_features": False}, "test_pages_of_a_shared_prefix_serve_as_its_own"),
        # It takes the feature of a token for the one before it.
        ({"features_of": lambda self, hidden: (hidden.states.roll(1, 0),)}, "test_chunks_of_a_prompt_change_no_draft"),
        # It keeps the features of so many tokens only that it cannot resume.
        ({"resumes": True}, "test_rows_further_behind_than_its_window_have_no_drafts"),
    ],
)
def test_a_drafter_that_loses_features_is_rejected(fault: dict[str, Any], test: str) -> None:
    def make(self: DrafterContract) -> Drafter:
        part = eagle("eagle", "", "spec_decode.verify=rejection")
        return loud(variant(Eagle, "Broken", **fault)(part.config))

    assert rejects(suite(TestEagle, make=make), test)


# The engine's side.


class Spy(Drafter):
    """Proposes token 1 twice; the entries after these are invalid ids."""

    ahead = 3
    garbage = 1

    def __init__(self) -> None:
        super().__init__(None)
        self.observed: list[int] = []
        self.asked = 0

    @property
    def lookahead(self) -> int:
        return self.ahead

    def observe(self, fed: FedTokens, hidden: Hidden) -> None:
        assert len(fed.ids_T) == len(fed.slots_T) == len(hidden.states)
        self.observed.append(len(hidden.states))

    def propose(self, ctx: DraftContext) -> Draft:
        self.asked += 1
        tokens_BK = torch.full((len(ctx.slots_B), ctx.k), self.garbage, dtype=torch.int32)
        tokens_BK[:, :2] = 1
        return Draft(tokens_BK, torch.full((len(ctx.slots_B),), 2, dtype=torch.int32))


def run(drafter: Drafter, drafted: Sequence[bool] = (True, True, True)) -> list[StepResult]:
    """Run a prompt in two chunks, then steps that verify as many drafts as the drafter can offer, or none."""
    before = torch.is_grad_enabled()
    rank = load_rank(small_composition(), quiet)
    runner = Runner(replace(rank.parts, drafter=drafter), rank.info.num_pages)
    script, k = Script(), drafter.lookahead
    script.add([Row(0, 1, 1, 6, 6, 0, 0)], {Join(0, 1, 1, 0): prompt(10, 3)})
    script.add([Row(0, 1, 1, 4, 10, 0, RowFlag.SAMPLE)])
    for step, drafts in enumerate(drafted, 1):
        most = k * drafts
        script.add([Row(0, 1, 1, 1 + most, 10 + step * (1 + k), most, RowFlag.SAMPLE | RowFlag.DECODE)])
    for plan, blobs in script.steps:
        runner.execute(plan, blobs)
    results = [runner.collect() for _ in script.steps]
    runner.close()
    torch.set_grad_enabled(before)
    return results


def test_with_lookahead_0_it_is_never_asked() -> None:
    spy = Spy()
    spy.ahead = 0
    assert [len(result.rows[0].tokens) for result in run(spy)] == [0, 1, 1, 1, 1]
    assert spy.asked == 0


@pytest.mark.parametrize("drafted", [(True, True, True), (False, False, True, False, True), (False, False)])
def test_it_is_asked_before_every_step_that_verifies_drafts(drafted: tuple[bool, ...]) -> None:
    """Steps without drafts neither cost a proposal nor change the tokens."""
    spy, never = Spy(), Spy()
    results = run(spy, drafted)
    assert spy.asked == sum(drafted)
    tokens, plain = (
        [token for result in each for token in result.rows[0].tokens] for each in (results, run(never, (False,) * 12))
    )
    assert tokens == plain[: len(tokens)] and never.asked == 0


def test_it_observes_every_step() -> None:
    spy = Spy()
    run(spy)
    assert spy.observed == [6, 4, 4, 4, 4]


def test_what_stands_behind_its_guesses_is_ignored() -> None:
    tidy, untidy = Spy(), Spy()
    untidy.garbage = -1
    assert [result.rows for result in run(untidy)] == [result.rows for result in run(tidy)]


@pytest.mark.parametrize(
    ("fact", "value", "says"),
    [
        ("lookahead", -1, "lookahead is -1, and it must be a number of drafts"),
        ("depth", 9, "depth is 9, and it must be from 1 to its lookahead=4"),
        (
            "draft_counts",
            (2, 1, 4),
            r"draft_counts are \[2, 1, 4\], and they must ascend from 1 or more to its lookahead=4",
        ),
        ("draft_counts", (0, 4), r"draft_counts are \[0, 4\], and they must"),
        ("draft_counts", (1, 2), r"draft_counts are \[1, 2\], and they must"),
        ("verify", "always", "verify is 'always', and there are draws, rejection, typical"),
    ],
)
def test_facts_outside_of_their_ranges_are_refused(
    fact: str, value: object, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NgramDrafter, fact, value)
    with pytest.raises(PluginError, match=f"spec_decode=ngram: its {says}"):
        check_fit(small_composition("spec_decode=ngram"))


def test_drafts_of_another_type_name_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy()
    monkeypatch.setattr(spy, "propose", lambda ctx: None)
    with pytest.raises(TypeError, match="Spy.propose returned None, not a Draft"):
        run(spy)


def test_drafts_of_the_host_are_ids() -> None:
    spy, row = Spy(), SimpleNamespace(uid=1, slot=2, draft=3)
    tracked = {1: SimpleNamespace(grammar=None, seq=SimpleNamespace(tokens=[5]))}
    given: list[Any] = [[7, -3, 2**70], "text", None]
    spy.propose_host = lambda tokens, k: given.pop(0)  # type: ignore[method-assign]
    plan: Any = SimpleNamespace(rows=[row])
    assert host_drafts(plan, tracked, (), spy)[0].tokens == (7, -1, -1)  # type: ignore[arg-type]
    for returned in ("'text'", "None"):
        with pytest.raises(TypeError, match=f"Spy.propose_host returned {returned}, not a sequence of token ids"):
            host_drafts(plan, tracked, (), spy)  # type: ignore[arg-type]


def test_kv_groups_with_ids_of_the_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NgramDrafter, "kv_groups", lambda self: (KVGroup(0, (0,)),))
    with pytest.raises(PluginError, match=r"spec_decode=ngram: its KV groups have ids \[0\], .*first_group = 1"):
        load_rank(small_composition("spec_decode=ngram"), quiet)
