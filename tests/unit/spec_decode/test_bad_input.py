"""Drafters that do not fit the target are refused before weights are loaded, with the value and what would work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLM
from dovetail.core.errors import CapabilityError, ConfigError
from dovetail.core.testing.executor_scripts import SMALL_LLAMA
from dovetail.plugins.model.llama.decoder import Llama
from dovetail.plugins.spec_decode.eagle_files import TAPS
from dovetail.plugins.spec_decode.head import Head

from .heads import DRAFT_VOCAB, save_head

HEADS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "vocabulary": ("eagle3", {"vocab_size": 32000}, {}, "a vocabulary of 32000, and this model has 4096: set spec_dec"),
    "hidden size": ("medusa", {"hidden_size": 128}, {}, "a hidden size of 128, and this model has 256: set spec_dec"),
    "taps": ("eagle3", {TAPS: [2, 4, 9]}, {}, "after 2, 4, 9 layers, and the model has 8: they must be from 1 to 8"),
    "d2t": ("eagle3", {}, {"d2t": torch.full((DRAFT_VOCAB,), 4000)}, "model.safetensors: .*d2t. maps .* below 4096"),
    "missing": ("parallel", {}, {"mask_hidden": None}, "1 missing .*mask_hidden"),
}
DUMMY = ["model@spec_decode.model=llama", "spec_decode.model.load=dummy", f"spec_decode.model.hf={SMALL_LLAMA}"]
WORDS: dict[str, tuple[list[str], type[Exception], str]] = {
    "K": (["spec_decode=draft_model", "spec_decode.lookahead=17"], ConfigError, "lookahead.* less than or equal to 16"),
    "nodes": (["spec_decode=draft_model", "spec_decode.tree=65"], ConfigError, "tree.* less than or equal to 64"),
    "draft model": (
        ["spec_decode=draft_model", *DUMMY],
        ConfigError,
        "vocabulary of 97 tokens, and the model one of 4",
    ),
    "files of the draft model": (
        ["spec_decode=draft_model", "model@spec_decode.model=llama", "spec_decode.model.path=/nowhere"],
        ConfigError,
        "^spec_decode.model.path=/nowhere: there is no .* Set spec_decode.model.path=<.*, or spec_decode.model.load=",
    ),
    "no files of the draft model": (
        ["spec_decode=draft_model", "model@spec_decode.model=llama"],
        ConfigError,
        "^spec_decode.model: neither of spec_decode.model.path and .*: set model@spec_decode.model=auto",
    ),
    "files of a draft model to be chosen": (
        ["spec_decode=draft_model", "model@spec_decode.model=auto", "spec_decode.model.path=/nowhere"],
        ConfigError,
        "^spec_decode.model.path=/nowhere: there is no ",
    ),
    "pipeline": (
        ["spec_decode=ngram", "engine.pp=2"],
        CapabilityError,
        "engine with pp 1 .no built-in executor .*; engine has 2. Would work: engine.pp=1",
    ),
}


@pytest.fixture(autouse=True)
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Any, weights: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(Llama, "load", load)
    monkeypatch.setattr(Head, "load", load)


def start(*words: str) -> None:
    with LLM("tiny", overrides=["engine.device=cpu", "engine.max_len=96", "engine.kv_pages=20", *words]):
        pass


@pytest.mark.parametrize(("name", "config", "tensors", "says"), HEADS.values(), ids=HEADS)
def test_a_head_of_another_model_is_refused(
    name: str, config: dict[str, Any], tensors: dict[str, Any], says: str, tmp_path: Path
) -> None:
    save_head(tmp_path / "head", name, config, tensors)
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        start(f"spec_decode={name}", f"spec_decode.path={tmp_path / 'head'}")


@pytest.mark.parametrize(("words", "error", "says"), WORDS.values(), ids=WORDS)
def test_options_that_do_not_fit_are_refused(words: list[str], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"(?s){says}"):
        start(*words)


@pytest.mark.parametrize("chosen", ["llama", "auto"])
def test_a_config_of_a_draft_model_that_cannot_be_read_is_the_same_error_for_auto(chosen: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "vocab_size": 97}')
    words = f"model@spec_decode.model={chosen}", f"spec_decode.model.path={tmp_path}"
    with pytest.raises(
        ConfigError, match=rf"^spec_decode.model.path={tmp_path}: config.json: the key '\w+' is missing"
    ):
        start("spec_decode=draft_model", *words)


def test_weights_of_a_drafter_that_fits_are_loaded(tmp_path: Path) -> None:
    save_head(tmp_path / "head", "eagle3")
    with pytest.raises(AssertionError, match="weights are loaded"):
        start("spec_decode=eagle3", f"spec_decode.path={tmp_path / 'head'}")
