"""compare.py: a peer drafts as we do."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError

from .conftest import BENCHMARKS, TINY, results_page

pytestmark = pytest.mark.nightly


def drafting(compare: ModuleType, folder: Path, *words: str, peer: str = "vllm") -> dict[str, Any] | None:
    found: dict[str, Any] | None = compare.drafting_of(compose([*TINY, *words], app="bench"), peer, folder)
    return found


def test_a_peer_drafts_as_we_do(compare: ModuleType, tmp_path: Path) -> None:
    assert drafting(compare, tmp_path) is None
    assert drafting(compare, tmp_path, "spec_decode=ngram", "spec_decode.lookahead=3") == {
        "method": "ngram",
        "drafts": 3,
        "rates": None,
        "match": [2, 4],
    }
    words = (
        "spec_decode=eagle3",
        "quant@spec_decode.quant=fp8",
        "spec_decode.simulate_acceptance=[0.5,0.5,0.4,0]",
    )
    found = drafting(compare, tmp_path, *words)
    assert found is not None
    config = json.loads((Path(found.pop("model")) / "config.json").read_text())
    assert found == {"method": "eagle3", "drafts": 4, "rates": [0.5, 0.25, 0.1, 0.0], "quantization": "fp8"}
    assert config["draft_vocab_size"] == 3072 and config["architectures"] == ["LlamaForCausalLM"]
    words = "spec_decode=eagle3_llama3_8b", "quant@spec_decode.quant=fp8", "model=llama3_8b", "model.load=dummy"
    found = drafting(compare, tmp_path, *words)
    assert found is not None
    config = json.loads((Path(found["model"]) / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == found["quantization"] == "fp8"
    found = drafting(compare, tmp_path, "spec_decode=draft_model", "spec_decode.simulate_acceptance=2")
    assert found is not None and Path(found["model"]).name == "tiny_draft"
    assert sum(found["rates"]) == pytest.approx(1, abs=1e-5), "mean tokens of a step besides the one that it draws"
    found = drafting(
        compare, tmp_path, "spec_decode=draft_model", "model@spec_decode.model=llama32_1b", "model=llama3_8b"
    )
    assert found is not None and json.loads((Path(found["model"]) / "config.json").read_text())["hidden_size"] == 2048


def test_drafters_that_a_peer_does_not_have_are_refused(compare: ModuleType, tmp_path: Path) -> None:
    for words, peer, fault in (
        (
            ("spec_decode=suffix",),
            "vllm",
            "spec_decode=suffix: vllm is compared with draft_model, eagle, eagle3, mtp, ngram",
        ),
        (("spec_decode=ngram",), "transformers", "spec_decode=ngram: transformers runs without drafts here"),
        (("spec_decode=eagle3", "spec_decode.tree=8"), "vllm", "spec_decode.tree=8: vllm drafts chains alone"),
        (
            ("spec_decode=eagle3", "quant@spec_decode.quant=int8"),
            "vllm",
            "spec_decode.quant=int8: drafters are compared",
        ),
    ):
        with pytest.raises(ConfigError, match=fault):
            drafting(compare, tmp_path, *words, peer=peer)


def test_options_of_vllm(compare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    peer = importlib.import_module("vllm_peer")
    head = {"method": "eagle3", "drafts": 2, "rates": [0.5, 0.25], "model": "/head", "quantization": None}
    plain = {"method": "eagle3", "num_speculative_tokens": 2, "model": "/head"}
    assert peer.speculative_config(head, False) == plain
    assert peer.speculative_config(head, True) == plain | {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.5, 0.25],
    }
    lookup = {"method": "ngram", "drafts": 4, "rates": None, "match": [2, 3]}
    assert peer.speculative_config(lookup, True) == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 3,
    }


def test_speedups_are_those_of_each_engine(compare: ModuleType) -> None:
    def result(ours: float, theirs: float) -> dict[str, Any]:
        figures = {"one_token_s": 0.5, "output_tokens_per_s": 100.0}
        sizes = {"requests": 8, "prompt_tokens": 512, "output_tokens": 256}
        row = {
            "workload": "8x512/256",
            **sizes,
            "dovetail": figures | {"tpot_ms": ours},
            "vllm": figures | {"tpot_ms": theirs},
        }
        return {"comparisons": [row | {"ratio": {"tpot_ms": ours / theirs}}], "engines": {}}

    table = compare.table.tables({"8b_fp8_drafts_none": result(3, 4), "8b_fp8_drafts_eagle3": result(1.25, 2)})
    lines = [line for line in table.splitlines() if "SIMULATED" in line]
    assert lines == [
        "| 8B FP8, eagle3, SIMULATED acceptance, 8 x 512/256 | 1.25 / 2 (0.62) | 0.5 / 0.5 | 100 / 100 |",
        "| 8B FP8, eagle3, SIMULATED acceptance, 8 x 512/256 | 2.4 / 2 (1.20) |",
    ]
    assert not any("8B FP8, none" in line for line in table.partition("drafter, requests")[2].splitlines())


def test_runs_with_drafts_and_without_are_not_the_same_settings(compare: ModuleType, tmp_path: Path) -> None:
    def equal(*words: str) -> dict[str, Any]:
        found: dict[str, Any] = compare.shared_settings(compose([*TINY, *words], app="bench"), "vllm", tmp_path).equal
        return found

    plain, drafts = equal(), equal("spec_decode=ngram")
    assert plain["drafting"] is None and plain != drafts
    assert equal("spec_decode=eagle3")["drafting"].keys() == {"method", "drafts", "rates", "quantization"}


def test_what_vllm_writes_into_its_options_is_not_reported(
    compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.24 adds its ModelConfig to the options of drafts, which JSON cannot hold."""

    def engine(**options: Any) -> None:
        options["speculative_config"]["target_model_config"] = object()

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=engine, __version__="0.24.0"))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    peer = importlib.import_module("vllm_peer")
    monkeypatch.setattr(peer, "simulates_acceptance", lambda: True)
    composition = compose([*TINY, "spec_decode=ngram"], app="bench")
    settings = asdict(compare.shared_settings(composition, "vllm", tmp_path)) | {"engine_args": {}}
    with peer.load(settings) as (_, about):
        options = json.loads(json.dumps(about))["engine_args"]["speculative_config"]
    assert options["method"] == "ngram" and "target_model_config" not in options


@pytest.mark.parametrize("simulated", [True, False])
def test_the_page_says_that_acceptance_was_simulated(simulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = ["SIMULATED acceptance: drafts are accepted by a coin"] * simulated
    engines = {"dovetail": {"engine": "dovetail", "startup_s": 2, "slower_paths": notes}}
    started, _ = results_page({"engines": engines, "comparisons": []}, monkeypatch)
    assert started == "dovetail (start-up 2 s)" + ", SIMULATED acceptance" * simulated
