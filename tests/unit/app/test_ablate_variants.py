"""Variants of an ablation, their baselines, and invalid options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.core.compose import Composition, compose
from dovetail.core.errors import ConfigError
from dovetail.plugins.app.ablate.variants import Variant, make, merged, word

pytestmark = pytest.mark.nightly


def variants(*overrides: str, unfit: Any = lambda name, one, block: None) -> list[Variant]:
    composition = compose(list(overrides), app=None if any(o.startswith("app=") for o in overrides) else "ablate")
    return make(composition.app_part.config, composition, unfit)  # type: ignore[arg-type]


def chosen(one: Composition) -> tuple[str, str, int]:
    return one.part("kv_cache").name, one.part("spec_decode").name, one.engine.page_size


def test_a_grid_has_every_combination_and_the_composition_as_given() -> None:
    found = variants("ablate.vary={kv_cache:[paged,radix],engine.page_size:[8,16]}", "spec_decode=ngram")
    assert [variant.name for variant in found] == [
        "kv_cache=prefix_hash, engine.page_size=16",
        "kv_cache=paged, engine.page_size=8",
        "kv_cache=paged, engine.page_size=16",
        "kv_cache=radix, engine.page_size=8",
        "kv_cache=radix, engine.page_size=16",
    ]
    assert [chosen(variant.composition) for variant in found] == [
        ("prefix_hash", "ngram", 16), ("paged", "ngram", 8), ("paged", "ngram", 16), ("radix", "ngram", 8),
        ("radix", "ngram", 16),
    ]  # fmt: skip
    assert found[0].baselines == () and {variant.baselines for variant in found[1:]} == {(found[0].name,)}
    assert all(variant.composition.app == "bench" for variant in found)


def test_what_equals_the_composition_as_given_is_the_baseline() -> None:
    found = variants("kv_cache=paged", "ablate.vary={kv_cache:[paged,radix],spec_decode:[none,ngram]}")
    assert [variant.name for variant in found] == [
        "kv_cache=paged, spec_decode=none",
        "kv_cache=paged, spec_decode=ngram",
        "kv_cache=radix, spec_decode=none",
        "kv_cache=radix, spec_decode=ngram",
    ]


def test_a_baseline_with_options_of_its_own_has_a_name_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "kv_cache").mkdir()
    (tmp_path / "kv_cache" / "lfu.yaml").write_text("defaults: [radix, _self_]\neviction: lfu\n")
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /kv_cache: lfu\n")
    composition = compose(["+preset=mine", "ablate.vary={kv_cache:[radix]}"], app="ablate", config_dirs=[str(tmp_path)])
    found = make(composition.app_part.config, composition)  # type: ignore[arg-type]
    assert [variant.name for variant in found] == ["as given, kv_cache=radix", "kv_cache=radix"]
    assert [one.composition.part("kv_cache").config.eviction for one in found] == ["lfu", "lru"]


def test_one_at_a_time() -> None:
    found = variants(
        "ablate.design=one_at_a_time", "ablate.vary={kv_cache:[paged,prefix_hash],engine.page_size:[8,32]}"
    )
    assert [variant.changes for variant in found] == [
        (), ("kv_cache=paged",), ("engine.page_size=8",), ("engine.page_size=32",)
    ]  # fmt: skip


def test_presets_and_values_of_every_type_vary() -> None:
    found = variants("ablate.vary={preset:[tiny_cpu],engine.cuda_graphs:[false],engine.memory_fraction:[0.5]}")
    engine = found[1].composition.engine
    assert (engine.device, engine.cuda_graphs, engine.memory_fraction) == ("cpu", False, 0.5)


@pytest.mark.parametrize(
    "value", ["a,b", "true", "3", 'say "x"', "C:\\x", "x\\", '\\"', "/models/a b", "", "plain", "null"]
)
def test_a_text_stays_the_text(value: str) -> None:
    made = compose([word("quant.skip", "x"), word("engine.kv_dtype", value)][1:], app="bench")
    assert made.engine.kv_dtype == value


def test_words_take_the_place_of_those_with_their_key() -> None:
    assert merged(["kv_cache=radix", "+preset=a", "engine.tp=2"], ["+preset=b", "kv_cache=paged"]) == [
        "engine.tp=2", "+preset=b", "kv_cache=paged"
    ]  # fmt: skip


LADDER = "ablate.ladder={first:[scheduler=static],paged:[kv_cache=paged],big:[engine.page_size=32],eight:[quant=int8]}"


def test_a_ladder_adds_up() -> None:
    found = variants(LADDER.replace("[", '["').replace("]", '"]'))
    assert [variant.baselines for variant in found] == [(), ("first",), ("paged", "first"), ("big", "first")]
    last = found[-1].composition
    assert (last.part("scheduler").name, *chosen(last)[::2], last.part("quant").name) == ("static", "paged", 32, "int8")


def test_arms_change_several_options_of_the_composition_as_given() -> None:
    found = variants('ablate.arms={big:["engine.page_size=64","engine.kv_pages=8"],radix:["kv_cache=radix"]}')
    assert [(variant.name, variant.baselines) for variant in found] == [
        ("as given", ()), ("big", ("as given",)), ("radix", ("as given",))
    ]  # fmt: skip
    assert [chosen(variant.composition)[::2] for variant in found] == [
        ("prefix_hash", 16), ("prefix_hash", 64), ("radix", 16)
    ]  # fmt: skip


def test_each_block_has_a_baseline_of_its_own() -> None:
    found = variants("ablate.vary={kv_cache:[paged]}", "ablate.across={workload.requests:[2,3],engine.max_seqs:[4]}")
    block = "workload.requests={}, engine.max_seqs=4".format
    assert [variant.block for variant in found] == [block(2)] * 2 + [block(3)] * 2
    assert found[3].name == f"{block(3)}: kv_cache=paged"
    assert found[3].baselines == (found[2].name,) and found[2].baselines == ()
    assert [one.composition.part("workload").config.requests for one in found] == [2, 2, 3, 3]  # type: ignore[attr-defined]


def test_what_a_host_cannot_do_is_skipped_and_left_out_of_later_steps() -> None:
    words = LADDER.replace("[", '["').replace("]", '"]')
    found = variants(words, unfit=lambda name, one, block: "no such pages here" if name == "big" else None)
    assert [variant.skipped for variant in found] == [None, None, "no such pages here", None]
    assert found[-1].composition.engine.page_size == 16 and found[-1].baselines == ("paged", "first")


@pytest.mark.parametrize("app", ["ladder", "ladder_h200"])
def test_the_ladder_that_ships(app: str) -> None:
    found = variants(f"app={app}")
    assert [variant.name for variant in found] == [
        "static batching", "continuous batching", "+ chunked prefill", "+ prefix caching", "+ FP8 weights", "+ FP8 KV",
        "+ speculative decoding",
    ]  # fmt: skip
    whole, cut = found[1].composition, found[2].composition
    assert not whole.part("scheduler").config.chunked and cut.part("scheduler").config.chunked
    assert cut.engine.token_budget == {"ladder": 256, "ladder_h200": 2048}[app] and whole.engine.token_budget == 2048
    last = found[-1].composition
    assert (last.part("quant").name, last.engine.kv_dtype, last.part("spec_decode").name) == (
        "fp8", "fp8_e4m3", "ngram"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), ["needs something to try", "app=ladder"]),
        (
            ("ablate.vary={kv_cash:[paged],scheduler:[fcf],workload:[fixed],quant:[none,none],ablate.runs:[1]}",),
            [
                "5 mistakes in the variants", "Did you mean `kv_cache`", "Did you mean `fcfs`",
                "`workload` cannot vary", "quant has none twice", "`ablate.runs` cannot vary",
            ],
        ),
        (("ablate.vary={engine.page_size:[-1,true]}",), ["page_size=-1: should be", "page_size=true: should be"]),
        (("ablate.vary={kv_cache:[prefix_hash]}",), ["every value equals the baseline's"]),
        (("ablate.vary={kv_cache:[paged]}", "kv_cache.eviction=lfu"), ["kv_cache=paged: kv_cache.eviction"]),
        (("ablate.vary={scheduler.max_chunk:[4],scheduler:[fcfs,static]}",), ["static", "no option `max_chunk`"]),
        (('ablate.ladder={a:["kv_cache=paged"],b:["kv_cache=paged"]}',), ["b: composes to the same as the"]),
        (('ablate.ladder={a:["workload=poisson"],b:["quant=fp9"]}',), ["a: `workload=poisson`", "b: quant=fp9"]),
        (('ablate.ladder={a:["kv_cache=paged"]}',), ["one step"]),
        (("ablate.vary={kv_cache:[paged]}", 'ablate.ladder={a:["quant=fp8"]}'), ["give one of them"]),
        (("ablate.vary={kv_cache:[]}",), ["kv_cache"]),
        (('ablate.arms={a:["kv_cache=paged"],b:["kv_cache=paged"]}',), ["b: composes to the same as a"]),
        (('ablate.arms={a:["workload=poisson"],as given:["quant=fp8"]}',), ["a: `workload=poisson`", "is the name of"]),
        (("ablate.vary={kv_cache:[paged]}", "ablate.across={engine.page_size:[0],ablate.runs:[1]}"),
         ["2 mistakes", "page_size=0: should be", "across: `ablate.runs` cannot vary"]),
        (("ablate.vary={kv_cache:[paged]}", "ablate.across={kv_cache:[radix]}"), ["is in vary and in across"]),
    ],
)  # fmt: skip
def test_all_mistakes_are_reported_at_once(overrides: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        variants(*overrides)
    assert [text for text in words if text not in str(raised.value)] == [], str(raised.value)


def test_two_names_of_one_variant_are_reported() -> None:
    """Two keys yield the same composition."""
    with pytest.raises(ConfigError, match="composes to the same as"):
        variants("ablate.vary={preset:[tiny_cpu],engine.device:[cpu]}", "ablate.design=one_at_a_time")
