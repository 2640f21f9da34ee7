"""Validation of values: every mistake at once, in readable messages, and no implicit type conversion."""

import enum
import re
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, model_validator

from dovetail.core.compose import Config, EngineConfig
from dovetail.core.errors import ConfigError, DovetailDeprecationWarning


def test_every_mistake_at_once(composed):
    with pytest.raises(ConfigError) as caught:
        composed(
            "engine.tpp=2",
            "engine.device=gpu",
            "scheduler.max_chunk=0",
            "scheduler.ordr=length",
            "logits.penalties.scal=2",
            "generate.max_token=3",
            "shceduler=static",
            "kv_cache=radx",
            "nothing=null",
            "kv_cache.nonsense=1",
            "model=tiny,small",
            "just words",
        )
    text = str(caught.value)
    for words in (
        "engine.tpp: it has no option `tpp`. Did you mean `tp`?",
        "engine.device=gpu: should be 'auto', 'cpu' or 'cuda'.",
        "scheduler.max_chunk=0: should be greater than or equal to 1.",
        "scheduler.ordr: scheduler=fcfs has no option `ordr`. Did you mean `order`? Options: max_chunk, order.",
        "logits.penalties.scal: logits=penalties has no option `scal`. Did you mean `scale`?",
        "generate.max_token: app=generate has no option `max_token`. Did you mean `max_tokens`?",
        "`nothing` cannot be set.",
        "`shceduler` cannot be set. Did you mean `scheduler`?",
        "kv_cache=radx: no such kv_cache. Did you mean `radix`? Options: prefix_hash, radix.",
        "`model=tiny,small` gives several values.",
        "`just words` is not key=value.",
    ):
        assert words in text
    assert text.startswith("11 mistakes:")
    assert "nonsense" not in text, "which options there are depends on the choice that failed"


def test_one_mistake_is_one_line(composed):
    with pytest.raises(ConfigError) as caught:
        composed("scheduler.ordr=length")
    assert "\n" not in str(caught.value)


ONE = {
    "a setting of the engine": (["kv_cache.page_size=32"], "Did you mean `engine.page_size`, which every part reads"),
    "a boolean for a number": (["engine.tp=true"], "engine.tp=true: should be a whole number"),
    "a text for a flag": (["engine.late_launch=x"], "engine.late_launch=x: should be true or false"),
    "a text for a number": (["engine.tp='2'"], "engine.tp=2: should be a whole number"),
    "more than any machine has": (
        ["engine.max_seqs=100000000"],
        "max_seqs=100000000: should be less than or equal to 65536",
    ),
    "a fraction for a number": (["engine.tp=2.0"], "engine.tp=2.0: should be a whole number"),
    "false for a number": (["scheduler.max_chunk=false"], "scheduler.max_chunk=false: should be a whole number"),
    "true for a fraction": (["logits.penalties.scale=true"], "logits.penalties.scale=true: should be a valid number"),
    "an interpolation of nothing": (["scheduler.max_chunk=${engin.max_seqs}"], "'engin.max_seqs' not found"),
    "an option without effect": (["app=list", "scheduler.max_chunk=3"], "has no effect: app=list does not read"),
    "a setting without effect": (["app=list", "engine.tp=2"], "has no effect: app=list does not read"),
    "a kind that the app needs": (
        ["~scheduler"],
        "scheduler: app=generate needs one, and none is chosen. Options: fcfs, static",
    ),
    "a list for a kind of one": (["scheduler=[fcfs,static]"], "one scheduler is chosen, not 2"),
    "settings of Hydra": (["hydra.run.dir=x"], "a run makes no folders"),
    "a former name and the new one": (["scheduler.chunk=8", "scheduler.max_chunk=9"], "both are given"),
}


@pytest.mark.parametrize(("words", "message"), ONE.values(), ids=ONE)
def test_a_mistake_is_explained(composed, words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        composed(*words)


class Colour(enum.Enum):
    RED = "red"


class Rope(Config):
    theta: float = 1e4
    """Base."""


class Rich(Config):
    """All kinds of default values that OmegaConf would refuse or change."""

    mode: Literal["a", "b"] = "a"
    names: set[str] = Field(default_factory=lambda: {"x"})
    shape: tuple[int, ...] = (1, 2)
    place: Path = Path("/tmp/x")
    colour: Colour = Colour.RED
    template: str = "cost ${price} and \\${kept}"
    table: dict[str, int] = Field(default_factory=lambda: {"one": 1})
    rope: Rope = Rope()


@pytest.fixture
def rich(composed, stand_ins, make):
    registry = stand_ins(make("scheduler", "rich", Rich))
    return lambda *overrides: composed("scheduler=rich", *overrides, registry=registry).part("scheduler").config


def test_defaults_of_any_type_arrive_as_they_were(rich):
    assert rich() == Rich()


def test_values_of_any_type_can_be_given(rich):
    given = rich("scheduler.shape=[3]", "scheduler.names=[y]", "scheduler.place=/x", "scheduler.template='\\${price}'")
    assert (given.shape, given.names, given.place, given.template) == ((3,), {"y"}, Path("/x"), "${price}")


def test_a_dict_default_takes_new_keys(rich):
    assert rich("scheduler.table.two=2").table == {"one": 1, "two": 2}


def test_a_mistake_inside_a_record_is_named_by_its_path(rich):
    with pytest.raises(ConfigError, match=r"scheduler.rope.thata: .*Did you mean `theta`"):
        rich("scheduler.rope.thata=1")


def test_interpolation_reaches_across_nodes(composed):
    assert (
        composed("engine.max_seqs=3", "scheduler.max_chunk=${engine.max_seqs}").part("scheduler").config.max_chunk == 3
    )


def test_a_required_option_is_asked_for_with_its_meaning(composed, stand_ins, make):
    class Pathed(Config):
        path: str
        """Folder with weights."""

    registry = stand_ins(make("model", "llama", Pathed))
    with pytest.raises(ConfigError, match=r"^model.path is required: Folder with weights.$"):
        composed("model=llama", registry=registry)
    assert composed("model=llama", "model.path=x", registry=registry).part("model").config.path == "x"


def test_only_what_the_app_reads_is_validated(composed, stand_ins, make):
    class Pathed(Config):
        path: str

    registry = stand_ins(make("model", "llama", Pathed))
    assert composed("app=list", "model=llama", registry=registry).parts == {}


def test_what_the_app_does_not_read_cannot_be_asked_for(composed):
    found = composed("app=list")
    for ask in (lambda: found.engine, lambda: found.part("model")):
        with pytest.raises(ValueError, match="app=list does not declare that it needs"):
            ask()


class TestRenamed:
    def test_the_former_name_works_and_names_the_package(self, composed):
        with pytest.warns(
            DovetailDeprecationWarning, match="package home 1.0: scheduler.chunk is now scheduler.max_chunk"
        ):
            assert composed("scheduler.chunk=8").part("scheduler").config.max_chunk == 8

    def test_a_value_under_the_former_name_is_validated(self, composed):
        with (
            pytest.warns(DovetailDeprecationWarning),
            pytest.raises(ConfigError, match="scheduler.max_chunk=0: should be"),
        ):
            composed("scheduler.chunk=0")


def test_every_engine_setting_says_what_it_is():
    assert all(field.description for field in EngineConfig.model_fields.values())


def test_a_rule_of_the_config_itself_is_told_in_its_words(composed, stand_ins, make):
    class Paired(Config):
        low: int = 1
        high: int = 2

        @model_validator(mode="after")
        def ordered(self) -> "Paired":
            if self.low > self.high:
                raise ValueError(f"low={self.low} is above high={self.high}")
            return self

    with pytest.raises(ConfigError, match=r"^scheduler: low=5 is above high=2\.$"):
        composed("scheduler=paired", "scheduler.low=5", registry=stand_ins(make("scheduler", "paired", Paired)))
