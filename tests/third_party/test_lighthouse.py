"""examples/third_party_plugin from pip install to removal: found, selected by name, used, and removed without a
trace."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_plugin"
PACKAGE = "dovetail-lighthouse"
PARTS = {
    ("scheduler", "lighthouse"),
    ("logits", "no_repeat_ngram"),
    ("observer", "step_csv"),
    ("quant", "three_bits"),
}


@pytest.fixture
def generate(dovetail, lighthouse, tmp_path):
    """Run prompts and return the tokens fed in each prefill, and the output tokens by prompt."""

    def run(*words, prompts, max_tokens=2):
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
        app = ("prompts=prompts.jsonl", "output=out.jsonl", f"max_tokens={max_tokens}", "ignore_eos=true")
        common = ["engine.device=cpu", "observer=[step_csv]", *(f"generate.{option}" for option in app)]
        done = dovetail(*common, *words, path=(lighthouse,))
        assert done.returncode == 0, done.stderr
        with (tmp_path / "steps.csv").open() as file:
            fed = [int(line["tokens"]) for line in csv.DictReader(file)]
        with (tmp_path / "out.jsonl").open() as file:
            out = [json.loads(line)["completions"][0]["token_ids"] for line in file]
        assert [len(tokens) for tokens in out] == [max_tokens] * len(prompts)
        return [tokens for tokens in fed if tokens > 1], out

    return run


def lines(variable, count=12):
    return "".join(f"{variable}{i} = {i}\n" for i in range(count))


@pytest.mark.parametrize(
    ("words", "newest_first"),
    [(["scheduler=lighthouse_patient"], True), (["scheduler=lighthouse", "scheduler.max_age=0"], False)],
)
def test_the_scheduler_and_the_observer(generate, words, newest_first):
    """One sequence runs at a time, so whichever starts first, the two others wait together."""
    fed, _ = generate(*words, "engine.max_seqs=1", prompts=["a", lines("b", 2), lines("c", 6)], max_tokens=8)
    assert len(fed) == 3 and fed[1:] == sorted(fed[1:], reverse=newest_first)


@pytest.mark.parametrize("words", [["kv_cache=segmented"], ["kv_cache.eviction=lru"]])
def test_the_eviction_policy(generate, words):
    """A prompt that occurred twice is evicted after those that occurred once: the third time only its last, partial
    page is fed."""
    room = ["engine.max_seqs=1", "engine.max_len=128", "engine.kv_pages=18"]
    fed, _ = generate(*words, *room, prompts=[lines(c) for c in "aabcdea"])
    assert (fed[-1] < 32) == (words == ["kv_cache=segmented"]), fed


def test_the_policy_is_a_value_and_the_variant_sets_it(composed, lighthouse):
    by_value = composed("kv_cache.eviction=dovetail_lighthouse.eviction:SegmentedLRU", path=(lighthouse,))
    assert composed("kv_cache=segmented", path=(lighthouse,)) == by_value


def test_the_logits_processor(generate):
    words = ["logits=[penalties,no_repeat_ngram]", "logits.no_repeat_ngram.size=2"]
    _, (tokens,) = generate(*words, prompts=["x = 1, 1, 1, 1,"], max_tokens=24)
    assert len(set(zip(tokens, tokens[1:], strict=False))) == 23


def test_a_parameter_of_a_request_reaches_every_rank(generate):
    words = ["logits=[no_repeat_ngram]", "generate.extra.no_repeat_ngram=2", "executor=multiproc", "engine.tp=2"]
    _, (tokens,) = generate(*words, prompts=["x = 1, 1, 1, 1,"], max_tokens=24)
    assert len(set(zip(tokens, tokens[1:], strict=False))) == 23


def test_the_preset(dovetail, composed, lighthouse, tmp_path):
    chosen = yaml.safe_load(composed("+preset=lighthouse", path=(lighthouse,)))
    assert chosen["scheduler"] == {"name": "lighthouse", "max_age": 60}
    assert chosen["kv_cache"]["eviction"] == "dovetail_lighthouse.eviction:SegmentedLRU"
    assert (list(chosen["logits"])[-1], list(chosen["observer"])) == ("no_repeat_ngram", ["step_csv"])
    assert chosen["engine"]["depth"] == 2
    done = dovetail("+preset=lighthouse", "engine.device=cpu", "generate.max_tokens=4", path=(lighthouse,))
    assert (done.returncode, "4 tokens" in done.stderr) == (0, True), done.stderr
    assert sum(int(line["sampled"]) for line in csv.DictReader((tmp_path / "steps.csv").open())) == 4


def test_its_own_tests_pass(python, lighthouse):
    """Includes the contract suites."""
    how = ["-q", "-p", "no:cacheprovider", str(EXAMPLE / "tests")]
    done = python("-m", "pytest", *how, path=(lighthouse,), PYTEST_ADDOPTS="")
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


def test_installed_and_removed(listed, composed, refused, lighthouse, tmp_path):
    bare, default = listed(), composed()
    path = (shutil.copytree(lighthouse, tmp_path / "site"),)

    there = listed(*path)
    mine = [c for c in there["components"] if c["package"] == PACKAGE]
    assert {(c["kind"], c["name"]) for c in mine} == PARTS
    assert {c["version"] for c in mine} == {"1.0.0"} and there["problems"] == []
    assert all(option["doc"] for c in mine for option in c["options"])
    assert there["fingerprint"] != bare["fingerprint"]
    assert composed(path=path) == default, "it is installed but not selected"
    assert "Did you mean `lighthouse`?" in refused("scheduler=lighthous", path=path)
    assert "Did you mean `segmented`?" in refused("kv_cache=segmnted", path=path)

    blocked = listed(*path, DOVETAIL_PLUGINS=f"-{PACKAGE}")
    assert blocked["problems"][0]["package"] == f"{PACKAGE} 1.0.0"
    assert (blocked["fingerprint"], blocked["components"]) == (bare["fingerprint"], bare["components"])

    shutil.rmtree(path[0])
    assert listed(*path) == bare
    assert composed(path=path) == default
    for words in ("scheduler=lighthouse", "scheduler=lighthouse_patient", "kv_cache=segmented", "+preset=lighthouse"):
        message = refused(words, path=path)
        kind, _, name = words.lstrip("+").partition("=")
        options = message.partition("Options: ")[2]
        assert f"{kind}={name}: no such {kind}." in message and options and "lighthouse" not in options, message
    # A misspelling of the removed package's option gets no suggestion, like any unknown name.
    assert "Did you mean `lighthouse" not in refused("scheduler=lighthous", path=path)
    assert "No module named 'dovetail_lighthouse'" in refused(
        "kv_cache.eviction=dovetail_lighthouse.eviction:SegmentedLRU", "engine.device=cpu", path=path
    )
    assert not [p for p in EXAMPLE.rglob("*") if p.suffix in (".whl", ".egg-info") or p.name in ("build", "dist")]
