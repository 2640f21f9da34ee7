"""Presets, variants, nested parts and lists: what gets selected, and what stays unchanged."""

import itertools

import pytest

from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError, PluginError

PRESET = """
    # @package _global_
    defaults:
      - override /kv_cache: radix
      - override /logits: [min_tokens]

    engine:
      tp: 2
"""


def test_defaults_give_one_part_a_kind_and_lists_in_order(composed):
    found = composed()
    assert found.app == "generate"
    assert found.part("scheduler").name == "fcfs"
    assert list(found.many("logits")) == ["penalties", "logit_bias", "min_tokens"]


def test_shared_settings_survive_a_swap(composed):
    for scheduler in ("fcfs", "static"):
        assert composed(f"scheduler={scheduler}", "engine.token_budget=512").engine.token_budget == 512


def test_options_of_an_app_lie_under_its_name(composed):
    assert composed("app=serve", "serve.port=9000").app_part.config.port == 9000


def test_the_app_argument_wins_over_a_preset_but_not_silently_over_an_override(composed, conf):
    folder = conf("preset/served.yaml", "# @package _global_\ndefaults:\n  - override /app: serve\n")
    assert composed("+preset=served", app="generate", config_dirs=[folder]).app == "generate"
    with pytest.raises(ConfigError, match="the app is generate here"):
        composed("app=serve", app="generate")


def test_items_of_a_list_keep_their_own_options(composed):
    logits = composed("logits=[min_tokens,penalties]", "logits.penalties.scale=3").many("logits")
    assert {name: part.config.scale for name, part in logits.items()} == {"min_tokens": 1.0, "penalties": 3.0}
    assert list(logits) == ["min_tokens", "penalties"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["logits=[penalties]", "+logits=min_tokens"], ["penalties", "min_tokens"]),
        (["+logits=[min_tokens,penalties]", "+preset=short"], ["logit_bias", "min_tokens", "penalties"]),
        (
            ["+logits=penalties", "logits=[]", "+logits=min_tokens", "logits.penalties.scale=4"],
            ["penalties", "min_tokens"],
        ),
    ],
)
def test_a_list_is_lengthened(composed, conf, words, names):
    """The list may be selected by a preset or by another word."""
    folder = conf("preset/short.yaml", "# @package _global_\ndefaults:\n  - override /logits: [logit_bias]\n")
    assert list(composed(*words, config_dirs=[folder]).many("logits")) == names


def test_a_list_may_be_empty(composed):
    assert composed("logits=[]").many("logits") == {}


def test_parsers_are_all_at_hand_with_the_options_that_were_given(composed):
    assert composed("app=serve").many("tool_parser")["hermes"].config.scale == 1.0
    for chosen in ([], ["tool_parser=[hermes]"]):
        found = composed("app=serve", *chosen, "tool_parser.hermes.scale=2")
        assert found.many("tool_parser")["hermes"].config.scale == 2.0


MISTAKES = {
    "options of another app": (["serve.port=9000"], "`serve` has the options of app=serve, and the app is generate"),
    "an item twice": (["+logits=penalties"], r"\+logits=penalties: already chosen: logits=\[penalties,logit_bias,min"),
    "an unknown item": (["+logits=[pen]"], "logits=pen: no such logits"),
    "an unknown option of a parser": (
        ["app=serve", "tool_parser.hermes.scal=2"],
        "tool_parser.hermes.scal: tool_parser=hermes has no option",
    ),
    "an option of an item that is not chosen": (
        ["logits=[min_tokens]", "logits.penalties.scale=2"],
        r"logits.penalties is not chosen.* `logits=\[..., penalties\]`",
    ),
    "an option of an unknown item": (
        ["logits.penalty.scale=2"],
        "logits=penalty: no such logits. Did you mean `penalties`",
    ),
    "a nested part as a value": (
        ["spec_decode=draft", "spec_decode.model=small"],
        "spec_decode.model is a component of the kind model; choose it with `model@spec_decode.model=small`",
    ),
    "a missing plus": (["preset=tiny_cpu"], r"write `\+preset=tiny_cpu`"),
    "a plus too many": (
        ["+scheduler=static"],
        r"`\+scheduler=static`: there is one scheduler, and it has its entry already; write it without",
    ),
    "an unknown preset": (["+preset=tinycpu"], r"no such preset. Did you mean `tiny_cpu`\? Options: .*tiny_cpu"),
    "an unknown option of a nested part": (
        ["spec_decode=draft", "spec_decode.model.layer=1"],
        "spec_decode.model.layer: model=tiny has no option `layer`. Did you mean `layers`",
    ),
    "a nested part that is not there": (["spec_decode=none", "model@spec_decode.model=small"], "spec_decode.model"),
    "a name": (["scheduler.name=static"], "scheduler.name cannot be set; choose with `scheduler=static`"),
    "a name in a record": (["scheduler={name:static}"], "scheduler.name cannot be set; choose with `scheduler=static`"),
}


@pytest.mark.parametrize(("words", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_explained(composed, words, message):
    with pytest.raises(ConfigError, match=message):
        composed(*words)


class TestPresets:
    def test_a_preset_chooses(self, composed, conf):
        found = composed("+preset=fast", config_dirs=[conf("preset/fast.yaml", PRESET)])
        assert (found.part("kv_cache").name, list(found.many("logits")), found.engine.tp) == (
            "radix",
            ["min_tokens"],
            2,
        )

    def test_the_command_line_wins_and_inherits_nothing_from_what_it_replaced(self, composed, conf):
        folder = conf("preset/fast.yaml", PRESET)
        swapped = composed("+preset=fast", "kv_cache=prefix_hash", config_dirs=[folder])
        assert swapped.part("kv_cache") == composed().part("kv_cache")

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("# @package _global_\nkv_cache:\n  hosts: 3\n", "sets kv_cache: a preset only chooses"),
            ("# @package _global_\ngenerate:\n  max_tokens: 3\n", "sets generate: a preset only chooses"),
            ("defaults:\n  - override /kv_cache: radix\n", "must begin with `# @package _global_`"),
            ("# @package _global_\ndefaults:\n  - /kv_cache: radix\n", "there is one kv_cache: write `override"),
            ("# @package _global_\ndefaults:\n  - kv_cache: radix\n", "does not have the form"),
            ("# @package _global_\ndefaults:\n  - /logits@x: penalties\n", "there is no kind `logits@x`"),
            ("# @package _global_\ndefaults:\n  - /logits: penaltis\n", "Did you mean `penalties`"),
            ("# @package _global_\ndefaults:\n  - override /kv_cach: radix\n", "Did you mean `kv_cache`"),
            ("# @package _global_\ndefaults:\n  - override /kv_cache: radx\n", "Did you mean `radix`"),
            ("# @package _global_\ndefaults: [}\n", "cannot be read"),
        ],
    )
    def test_a_bad_preset_is_listed_and_fails_only_when_chosen(self, composed, conf, text, reason):
        folder = conf("preset/bad.yaml", text)
        listed = composed("app=list", config_dirs=[folder]).registry.problems_of("preset", "bad")
        assert len(listed) == 1 and reason in listed[0].reason
        with pytest.raises((PluginError, ConfigError)) as caught:
            composed("+preset=bad", config_dirs=[folder])
        assert reason in str(caught.value)

    @pytest.mark.parametrize(
        ("words", "observers"),
        [
            ([], ["trace"]),
            (["+observer=log"], ["trace", "log"]),
            (["observer=[]"], []),
            (["observer=[]", "+observer=log"], ["log"]),
            (["logits=[]", "observer.trace.every=3"], ["trace"]),
        ],
    )
    def test_a_preset_adds_to_a_list(self, composed, conf, words, observers):
        """Same as `+observer=trace`; a word that selects the list takes precedence."""
        text = "# @package _global_\ndefaults:\n  - override /logits: [penalties]\n"
        folder = conf("preset/more.yaml", text + "  - /observer: trace\n  - /logits: [min_tokens, logit_bias]\n")
        found = composed("+preset=more", *words, app="generate", config_dirs=[folder])
        logits = [] if "logits=[]" in words else ["penalties", "min_tokens", "logit_bias"]
        assert list(found.many("logits")) == logits
        listed = [file.chooses for file in found.registry.files if file.name == "more"]
        assert listed == [("logits=[penalties]", "+observer=trace", "+logits=[min_tokens,logit_bias]")]
        assert list(found.many("observer")) == observers

    def test_what_a_preset_adds_is_not_added_twice(self, composed, conf):
        folder = conf("preset/more.yaml", "# @package _global_\ndefaults:\n  - /observer: trace\n")
        with pytest.raises(ConfigError, match=r"\+observer=trace: already chosen: observer=\[trace\]"):
            composed("+preset=more", "+observer=trace", config_dirs=[folder])


class TestVariants:
    VARIANT = "defaults: [radix, _self_]\nhosts: 7\n"

    def test_a_variant_is_its_base_with_other_options(self, composed, conf):
        folder = conf("kv_cache/radix_big.yaml", self.VARIANT)
        part = composed("kv_cache=radix_big", "kv_cache.share=0.25", config_dirs=[folder]).part("kv_cache")
        assert (part.name, part.config.hosts, part.config.share) == ("radix", 7, 0.25)

    def test_a_variant_leaves_no_trace_when_swapped(self, composed, conf):
        folder = conf("kv_cache/radix_big.yaml", self.VARIANT)
        conf("preset/big.yaml", "# @package _global_\ndefaults:\n  - override /kv_cache: radix_big\n")
        assert composed("+preset=big", "kv_cache=radix", config_dirs=[folder]).part("kv_cache").config.hosts == 0

    def test_a_variant_of_an_item_and_of_an_app(self, composed, conf):
        conf("logits/strong.yaml", "defaults: [penalties, _self_]\npenalties:\n  scale: 9\n")
        text = "# @package _global_\ndefaults: [serve, _self_]\nserve:\n  port: 1\n"
        folder = conf("app/serve_low.yaml", text)
        found = composed("logits=[strong]", "app=serve_low", config_dirs=[folder])
        assert found.many("logits")["penalties"].config.scale == 9
        assert (found.app, found.app_part.config.port) == ("serve", 1)

    def test_a_variant_needs_one_base(self, composed, conf):
        folder = conf("kv_cache/none.yaml", "hosts: 7\n")
        conf("kv_cache/two.yaml", "defaults: [radix, prefix_hash, _self_]\n")
        with pytest.raises(PluginError, match="names no base"):
            composed("kv_cache=none", config_dirs=[folder])
        with pytest.raises(ConfigError, match="a variant has one base"):
            composed("kv_cache=two", config_dirs=[folder])

    def test_two_variants_of_one_base_are_refused(self, composed, conf):
        folder = conf("kv_cache/small.yaml", "defaults: [radix, _self_]\n")
        conf("kv_cache/large.yaml", "defaults: [radix, _self_]\n")
        assert composed("kv_cache=[small]", config_dirs=[folder]).choices["kv_cache"] == "small"
        with pytest.raises(ConfigError, match="one kv_cache is chosen, not 2"):
            composed("kv_cache=[small,large]", config_dirs=[folder])

    def test_a_broken_variant_that_a_preset_chooses_fails_where_it_is_read(self, composed, conf):
        folder = conf("kv_cache/none.yaml", "hosts: 7\n")
        conf("preset/odd.yaml", "# @package _global_\ndefaults:\n  - override /kv_cache: none\n")
        assert composed("+preset=odd", "app=list", config_dirs=[folder]).app == "list"
        with pytest.raises(PluginError, match="kv_cache=none cannot be used: .* names no base"):
            composed("+preset=odd", config_dirs=[folder])
        conf("kv_cache/none.yaml", "defaults: [}\n")
        with pytest.raises(ConfigError, match="while parsing"):
            composed("+preset=odd", config_dirs=[folder])

    def test_a_file_may_not_have_the_name_of_a_component(self, composed, conf):
        folder = conf("kv_cache/radix.yaml", self.VARIANT)
        assert composed("scheduler=static", config_dirs=[folder]).app == "generate"
        with pytest.raises(PluginError, match="has the name of a component"):
            composed("kv_cache=radix", config_dirs=[folder])

    def test_a_file_may_not_have_the_name_of_another_file(self, composed, conf):
        folder = conf("preset/tiny_cpu.yaml", PRESET)
        with pytest.raises(PluginError, match="tiny_cpu.yaml is in home 1.0 and in"):
            composed("+preset=tiny_cpu", config_dirs=[folder])

    def test_a_folder_that_is_no_kind_is_listed(self, composed, conf):
        folder = conf("schedulers/x.yaml", self.VARIANT)
        reasons = [p.reason for p in composed(config_dirs=[folder]).registry.problems]
        assert reasons == ["its config folder `schedulers` is not a kind. Did you mean `scheduler`?"]

    def test_a_missing_folder_is_a_mistake(self, composed, tmp_path):
        with pytest.raises(ConfigError, match="no such folder"):
            composed(config_dirs=[str(tmp_path / "nowhere")])


class TestNestedParts:
    def test_a_part_has_a_default_and_is_a_group_of_its_own(self, composed):
        assert composed("spec_decode=draft").part("spec_decode").config.model.name == "tiny"
        found = composed("spec_decode=draft", "model@spec_decode.model=small", "spec_decode.model.layers=1")
        nested = found.part("spec_decode").config.model
        assert (nested.name, nested.config.layers) == ("small", 1)
        assert (found.part("model").name, found.part("model").config.layers) == ("tiny", 2)

    def test_several_parts_do_not_merge(self, composed):
        observers = (
            composed("spec_decode=draft", "spec_decode.observers.log.every=5").part("spec_decode").config.observers
        )
        assert {name: part.config.every for name, part in observers.items()} == {"log": 5, "trace": 1}


def test_the_order_of_overrides_does_not_matter(composed, conf):
    folder = conf("preset/fast.yaml", PRESET)
    asked = ("+preset=fast", "kv_cache.hosts=3", "engine.tp=4", "scheduler=static")
    found = [composed(*order, config_dirs=[folder]) for order in itertools.permutations(asked)]
    assert all((f.parts, f.engine) == (found[0].parts, found[0].engine) for f in found)
    assert found[0].engine.tp == 4 and found[0].part("kv_cache").config.hosts == 3


def test_composing_again_from_what_was_asked_for_gives_the_same(composed):
    first = composed("scheduler=static", app="serve")
    assert composed(*first.overrides) == first


def test_the_yaml_shows_what_the_app_reads(composed):
    shown = composed("scheduler.max_chunk=8", "spec_decode=draft").to_yaml()
    assert "scheduler:\n  name: fcfs\n  max_chunk: 8\n" in shown
    assert "  model:\n    name: tiny\n    layers: 2\n" in shown
    assert "attention" not in shown


def test_a_choice_is_known_by_its_name_whoever_made_it():
    chosen = compose(["app=bench", "+preset=ladder_h200", "quant=int8"]).choices
    assert chosen["workload"] == "system_prompt" and chosen["model"] == "llama3_8b", "by a preset"
    assert (chosen["quant"], chosen["scheduler"], chosen["app"]) == ("int8", "fcfs", "bench"), "a word or the default"
    assert chosen.keys().isdisjoint({"logits", "observer", "preset"})
    assert compose(["app=bench", "workload=batch64"]).choices["workload"] == "batch64"
