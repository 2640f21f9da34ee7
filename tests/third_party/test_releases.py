"""Packages written for earlier versions of the contracts still load, or are refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.core.compose import KINDS

from .conftest import listing, pip_install, refusal, run_all, words

FIRST = Path(__file__).parent / "releases" / "first"
UNCHANGED = {"observer", "router", "workload"}
"""Kinds whose contract is the first one. A kind that changes leaves this set."""
CHANGED = {"attention": "attention=first", "grammar": "grammar=first", "logits": "logits=[first]"}
CHANGED |= {kind: f"{kind}=first" for kind in ("cost", "model", "quant", "scheduler", "spec_decode")}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    site = pip_install(FIRST, tmp_path_factory.mktemp("site") / "first")
    small = ("engine.device=cpu", "engine.kv_pages=64", "observer=[first]")
    run = words("app=bench", "workload=first", "workload.most=3", "bench.warmup=0", *small)
    routed = words("router=first", "engine.dp=2", "--cfg", "job")
    refused = (words(text) for text in CHANGED.values())
    return run_all(tmp_path_factory.mktemp("run"), listing(), run, routed, *refused, path=(site,))


def test_unchanged_contracts_run_it(results):
    (code, listed), (ran, out), (routed, _), *_ = results
    assert (code, ran, routed) == (0, 0, 0), out
    found = {c["kind"] for c in json.loads(listed)["components"] if c["package"] == "dovetail-first"}
    assert found == UNCHANGED == {kind for kind in UNCHANGED if KINDS[kind].api.endswith("/0.1")}
    assert out.count("first observer: step") > 2


def test_changed_contracts_refuse_it_in_words(results):
    for kind, result in zip(CHANGED, results[3:], strict=True):
        words = f"it is made for {kind}/0.1, and this Dovetail implements {KINDS[kind].api}"
        assert words in refusal(result) and "dovetail-first 0.1.0" in refusal(result)
