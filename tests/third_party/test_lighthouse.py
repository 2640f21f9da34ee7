"""examples/third_party_plugin from pip install to removal: found, selected by name, used, and removed without a
trace."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from .conftest import composing, listing, refusal, run_all, words

pytestmark = pytest.mark.nightly

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_plugin"
PACKAGE = "dovetail-lighthouse"
PARTS = {
    ("scheduler", "lighthouse"),
    ("logits", "no_repeat_ngram"),
    ("observer", "step_csv"),
    ("quant", "three_bits"),
}


def lines(variable, count=12):
    return "".join(f"{variable}{i} = {i}\n" for i in range(count))


# The third prompt of a scheduler waits together with the second, whichever starts first.
THREE = ["a", lines("b", 2), lines("c", 6)]
ROOM = ("engine.max_seqs=1", "engine.max_len=128", "engine.kv_pages=18")
# A prompt that occurred twice is evicted after those that occurred once.
TWICE = [lines(c) for c in "aabcdea"]
ONES = ["x = 1, 1, 1, 1,"]
RUNS = {
    "newest first": (("scheduler=lighthouse_patient", "engine.max_seqs=1"), THREE, 8),
    "oldest first": (("scheduler=lighthouse", "scheduler.max_age=0", "engine.max_seqs=1"), THREE, 8),
    "segmented": (("kv_cache=segmented", *ROOM), TWICE, 2),
    "lru": (("kv_cache.eviction=lru", *ROOM), TWICE, 2),
    "option": (("logits=[penalties,no_repeat_ngram]", "logits.no_repeat_ngram.size=2"), ONES, 24),
    "two ranks": (
        ("logits=[no_repeat_ngram]", "generate.extra.no_repeat_ngram=2", "executor=multiproc", "engine.tp=2"),
        ONES,
        24,
    ),
}
"""Words, prompts and number of output tokens by name."""
COMPOSED = {
    "variant": ("kv_cache=segmented",),
    "by value": ("kv_cache.eviction=dovetail_lighthouse.eviction:SegmentedLRU",),
    "preset": ("+preset=lighthouse",),
}


@dataclass
class Ran:
    fed: dict[str, list[int]]
    """Number of tokens fed in each prefill, by run."""
    out: dict[str, list[list[int]]]
    """Output tokens by run and prompt."""
    composed: dict[str, str]
    preset: Path
    """Folder in which the preset has run."""


@pytest.fixture(scope="module")
def ran(lighthouse, tmp_path_factory):
    """Run everything in one process."""
    common = ("engine.device=cpu", "observer=[step_csv]", "generate.ignore_eos=true")
    common += ("generate.prompts=prompts.jsonl", "generate.output=out.jsonl")
    work = []
    for chosen, prompts, tokens in RUNS.values():
        folder = tmp_path_factory.mktemp("run")
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
        work.append(words(*common, *chosen, f"generate.max_tokens={tokens}", cwd=folder))
    preset = tmp_path_factory.mktemp("preset")
    work.append(words("+preset=lighthouse", "engine.device=cpu", "generate.max_tokens=4", cwd=preset))
    results = run_all(preset, *work, *(composing(*chosen) for chosen in COMPOSED.values()), path=(lighthouse,))
    assert [code for code, _ in results] == [0] * len(results), results
    assert "4 tokens" in results[len(RUNS)][1]
    found = Ran({}, {}, dict(zip(COMPOSED, (out for _, out in results[-len(COMPOSED) :]), strict=True)), preset)
    for (name, (_, prompts, tokens)), one in zip(RUNS.items(), work, strict=False):
        with (one.cwd / "steps.csv").open() as file:
            found.fed[name] = [fed for line in csv.DictReader(file) if (fed := int(line["tokens"])) > 1]
        with (one.cwd / "out.jsonl").open() as file:
            found.out[name] = [json.loads(line)["completions"][0]["token_ids"] for line in file]
        assert [len(ids) for ids in found.out[name]] == [tokens] * len(prompts)
    return found


@pytest.mark.parametrize(("run", "newest_first"), [("newest first", True), ("oldest first", False)])
def test_the_scheduler_and_the_observer(ran, run, newest_first):
    """One sequence runs at a time, so whichever starts first, the two others wait together."""
    fed = ran.fed[run]
    assert len(fed) == 3 and fed[1:] == sorted(fed[1:], reverse=newest_first)


@pytest.mark.parametrize(("run", "kept"), [("segmented", True), ("lru", False)])
def test_the_eviction_policy(ran, run, kept):
    """The third time only the prompt's last, partial page is fed."""
    assert (ran.fed[run][-1] < 32) == kept


def test_the_policy_is_a_value_and_the_variant_sets_it(ran):
    assert ran.composed["variant"] == ran.composed["by value"]


@pytest.mark.parametrize("run", ["option", "two ranks"])
def test_the_logits_processor(ran, run):
    """The option, and a parameter of a request that reaches every rank."""
    (tokens,) = ran.out[run]
    assert len(set(zip(tokens, tokens[1:], strict=False))) == 23


def test_the_preset(ran):
    chosen = yaml.safe_load(ran.composed["preset"])
    assert chosen["scheduler"] == {"name": "lighthouse", "max_age": 60}
    assert chosen["kv_cache"]["eviction"] == "dovetail_lighthouse.eviction:SegmentedLRU"
    assert (list(chosen["logits"])[-1], list(chosen["observer"])) == ("no_repeat_ngram", ["step_csv"])
    assert chosen["engine"]["depth"] == 2
    assert sum(int(line["sampled"]) for line in csv.DictReader((ran.preset / "steps.csv").open())) == 4


@pytest.mark.nightly
def test_its_own_tests_pass(python, lighthouse):
    """Includes the contract suites."""
    how = ["-q", "-p", "no:cacheprovider", str(EXAMPLE / "tests")]
    done = python("-m", "pytest", *how, path=(lighthouse,))
    assert done.returncode == 0, done.stdout + done.stderr
    done = python("-c", "import dovetail_lighthouse as d; print(d.__file__)", path=(lighthouse,))
    assert Path(done.stdout.strip()).is_relative_to(lighthouse)


def test_listing_imports_no_torch(python, lighthouse):
    code = "import sys; from dovetail import compose; compose(['+preset=lighthouse']); print('torch' in sys.modules)"
    assert python("-c", code, path=(lighthouse,)).stdout == "False\n"


def test_the_tuning_table(python, lighthouse):
    code = (
        "from dovetail.core.compose import installed; from dovetail.core.tuning.cache import CHECKS;"
        "from dovetail.core.tuning.packages import package_tables;"
        "table, problems = package_tables(installed(), CHECKS);"
        "print(len(table.for_gpu('Lantern L1')), len(table.for_gpu('NVIDIA H200')) > 100, table.counts(), problems)"
    )
    out = python("-c", code, path=(lighthouse,)).stdout
    assert out.startswith("2 True {'dovetail': ") and out.endswith("'dovetail-lighthouse': 2} ()\n"), out


def test_installed_and_removed(dovetail, bare, lighthouse, tmp_path):
    listed, default = bare
    path = (shutil.copytree(lighthouse, tmp_path / "site"),)
    misspelled = [words("scheduler=lighthous"), words("kv_cache=segmnted")]
    block = {"DOVETAIL_PLUGINS": f"-{PACKAGE}"}
    (_, found), (_, composed), *refused, (_, blocked) = dovetail(
        listing(), composing(), *misspelled, listing(**block), path=path
    )
    there = json.loads(found)
    mine = [c for c in there["components"] if c["package"] == PACKAGE]
    assert {(c["kind"], c["name"]) for c in mine} == PARTS
    assert {c["version"] for c in mine} == {"1.0.0"} and there["problems"] == []
    assert all(option["doc"] for c in mine for option in c["options"])
    assert there["fingerprint"] != listed["fingerprint"]
    assert composed == default, "it is installed but not selected"
    assert [re.search("Did you mean `(.*?)`", refusal(one))[1] for one in refused] == ["lighthouse", "segmented"]
    without = json.loads(blocked)
    assert without["problems"][0]["package"] == f"{PACKAGE} 1.0.0"
    assert (without["fingerprint"], without["components"]) == (listed["fingerprint"], listed["components"])

    shutil.rmtree(path[0])
    choices = ("scheduler=lighthouse", "scheduler=lighthouse_patient", "kv_cache=segmented", "+preset=lighthouse")
    by_value = words(*COMPOSED["by value"], "engine.device=cpu")
    (_, found), (_, composed), unlike, missing, *refused = dovetail(
        listing(), composing(), misspelled[0], by_value, *map(words, choices), path=path
    )
    assert json.loads(found) == listed and composed == default
    for choice, result in zip(choices, refused, strict=True):
        message = refusal(result)
        kind, _, name = choice.lstrip("+").partition("=")
        options = message.partition("Options: ")[2]
        assert f"{kind}={name}: no such {kind}." in message and options and "lighthouse" not in options, message
    # A misspelling of the removed package's option gets no suggestion, like any unknown name.
    assert "Did you mean `lighthouse" not in refusal(unlike)
    assert "No module named 'dovetail_lighthouse'" in refusal(missing)
    assert not [p for p in EXAMPLE.rglob("*") if p.suffix in (".whl", ".egg-info") or p.name in ("build", "dist")]
