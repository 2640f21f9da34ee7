"""The app `quality`: its scores against torch, its windows and figures, and whole runs on the CPU."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.core.compose import compose
from dovetail.core.compose.cli import main
from dovetail.core.errors import ConfigError, DovetailError
from dovetail.core.tokenizer import Tokenizer
from dovetail.plugins.app.bench.inprocess import EngineTarget
from dovetail.plugins.app.quality import app as app_module
from dovetail.plugins.app.quality import measure as measure_module
from dovetail.plugins.app.quality.compare import equal_tokens, figures
from dovetail.plugins.app.quality.config import QualityConfig
from dovetail.plugins.app.quality.measure import Answers
from dovetail.plugins.app.quality.rows import Rows, check_bytes
from dovetail.plugins.app.quality.text import documents, windows
from dovetail.plugins.model import bundled

TINY = Path(bundled.__file__).parent / "tiny"
CPU = ("engine.device=cpu", "engine.dtype=float32", "engine.max_len=64", "engine.kv_pages=64", "engine.max_seqs=4")
SMALL = ("quality.windows=3", "quality.length=24", "quality.tokens=4")
VOCAB = 40


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return EngineTarget(compose(["model=tiny"], app="quality")).tokenizer


# Scores


def filled(windows: list[tuple[int, ...]], logits_WPV: torch.Tensor, reference: Rows | None = None) -> Rows:
    """Rows that received logits in pieces of unequal sizes, the last one twice, as after a preemption."""
    rows = Rows(windows, reference=reference, most_bytes=1 << 20)
    for ids, logits_PV in zip(windows, logits_WPV, strict=True):
        for piece in (*torch.arange(len(logits_PV)).split(17), torch.arange(3, 20)):
            rows.receive(list(ids), int(piece[0]), logits_PV[piece])
    return rows


def test_scores_are_those_of_torch() -> None:
    ids_WP = torch.randint(VOCAB, (2, 41))
    theirs_WPV = 3 * torch.randn(2, 40, VOCAB)
    logits_WPV = theirs_WPV + 2 * torch.randn(2, 40, VOCAB)
    theirs_WPV[:, :, 7] = logits_WPV[:, :, 7] = -math.inf  # A token that the model never produces.
    ids_WP[ids_WP == 7] = 8
    read = [tuple(row) for row in ids_WP.tolist()]
    reference = filled(read, theirs_WPV)
    rows = filled(read, logits_WPV, reference)
    rows.check()
    logprobs_NV = logits_WPV.double().reshape(-1, VOCAB).log_softmax(-1)
    nll_N = torch.nn.functional.nll_loss(logprobs_NV, ids_WP[:, 1:].reshape(-1), reduction="none")
    assert rows.nll_WP.reshape(-1) == pytest.approx(nll_N.numpy(), rel=1e-8)
    p_NV = theirs_WPV.double().reshape(-1, VOCAB).softmax(-1)
    terms_NV = torch.xlogy(p_NV, p_NV) - torch.where(p_NV > 0, p_NV * logprobs_NV, 0.0)
    assert rows.kl_WP.reshape(-1) == pytest.approx(terms_NV.sum(-1).numpy(), rel=1e-8)
    assert (rows.same_top_WP == (theirs_WPV.argmax(-1) == logits_WPV.argmax(-1)).numpy()).all()
    assert 0 < rows.same_top_WP.mean() < 1
    assert not reference.kl_WP.any() and reference.same_top_WP.all()


def test_a_reference_compared_with_itself_differs_by_nothing() -> None:
    read, logits_WPV = [tuple(range(22))], torch.randn(1, 21, VOCAB).bfloat16()
    rows = filled(read, logits_WPV, filled(read, logits_WPV))
    assert np.abs(rows.kl_WP).max() < 1e-12 and rows.same_top_WP.all()


def test_missing_and_infinite_scores_are_errors() -> None:
    read, logits_PV = [tuple(range(22)), tuple(range(1, 23))], torch.randn(21, VOCAB)
    rows = Rows(read, most_bytes=1 << 20)
    rows.receive(read[0], 0, logits_PV)
    rows.receive((1, 2, 3), 0, logits_PV)  # A prompt that is no window.
    with pytest.raises(DovetailError, match="logits of 21 of 42 positions did not reach this process"):
        rows.check()
    logits_PV[5] = math.nan
    rows.receive(read[1], 0, logits_PV)
    with pytest.raises(DovetailError, match="position 5 of window 1 is nan"):
        rows.check()


def test_the_reference_has_a_memory_limit() -> None:
    check_bytes(2, 10, 100, 4, 8000)
    with pytest.raises(ConfigError, match=r"more than quality\.reference_bytes=7999 .* lower quality\.windows or"):
        check_bytes(2, 10, 100, 4, 7999)
    with pytest.raises(ConfigError, match="reference_bytes"):
        Rows([(1, 2, 3)], most_bytes=0).receive((1, 2, 3), 0, torch.randn(2, VOCAB))


# Windows


def test_windows_differ_and_begin_as_texts_do(tokenizer: Tokenizer) -> None:
    config = QualityConfig(windows=20, length=100)
    found = windows(config, documents(config), tokenizer)
    assert len(set(found)) == 20
    assert all(len(ids) == 101 and ids[0] == 0 and 0 not in ids[1:] for ids in found), "BOS, then text"
    assert found == windows(config, documents(config), tokenizer)
    other = windows(QualityConfig(windows=20, length=100, seed=1), documents(config), tokenizer)
    assert set(other) != set(found)


def test_repeated_and_short_texts_have_too_few_windows(tokenizer: Tokenizer) -> None:
    text = "def f(x):\n    return x\n" * 100
    with pytest.raises(ConfigError, match=r"quality\.windows=32: the text has only \d+ different windows"):
        windows(QualityConfig(length=13, tokens=0), [text], tokenizer)


# Figures


def answers(nll: float, kl: list[float], greedy: list[list[int]]) -> Answers:
    kl_WP = np.repeat(np.array(kl)[:, None], 4, 1)
    rows: Any = SimpleNamespace(nll_WP=np.full(kl_WP.shape, nll), kl_WP=kl_WP, same_top_WP=kl_WP < 0.5)
    return Answers({}, rows, greedy)


def test_figures() -> None:
    reference = answers(2.0, [0.0, 0.0], [[1, 2, 3], [4, 5, 6]])
    found = figures(answers(2.1, [0.1, 0.9], [[1, 2, 3], [4, 9, 6]]), reference)
    assert figures(reference, None) == {"perplexity": pytest.approx(math.exp(2.0))}
    assert found["perplexity_change"] == {
        "value": pytest.approx(math.exp(0.1) - 1),
        "low": pytest.approx(math.exp(0.1) - 1),
        "high": pytest.approx(math.exp(0.1) - 1),
        "samples": 2,
        "unit": "windows",
    }
    assert found["kl"]["value"] == pytest.approx(0.5) and found["kl"]["low"] == 0.0, "no negative divergence"
    assert found["top1_agreement"]["value"] == 0.5 and found["top1_agreement"]["high"] == 1.0
    assert found["divergence_length"]["value"] == 2.0 and found["divergence_length"]["high"] == 3
    assert found["outputs_equal"] == 0.5 and found["divergence_by_window"] == [3, 1]
    assert found["kl_p99"] == pytest.approx(0.9)


@pytest.mark.parametrize(("mine", "same"), [([1, 2, 3], 3), ([1, 9, 3], 1), ([9], 0), ([], 0)])
def test_equal_tokens(mine: list[int], same: int) -> None:
    assert equal_tokens(mine, [1, 2, 3]) == same


# Runs


@pytest.mark.nightly
def test_a_run(tmp_path: Path, tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]) -> None:
    """In float32 the parts of the engine make no difference, a number format does, and another model a large one."""
    lines = ["engine.token_budget=16 engine.page_size=8", "quant=fp8", "model=tiny_draft", "attention=triton"]
    words = ["app=quality", f"quality.variants={json.dumps(lines)}", *CPU, *SMALL, f"quality.out={tmp_path / 'out'}"]
    assert main(words) == 0
    result = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert result["schema"] == "dovetail.quality/1" and not result["interrupted"]
    given, parts, quantized, other, skipped = (one["figures"] for one in result["variants"])
    assert list(given) == ["perplexity"] and skipped is None
    assert parts["kl"]["value"] < 1e-8 and parts["top1_agreement"]["value"] == 1 and parts["outputs_equal"] == 1
    assert 1e-5 < quantized["kl"]["value"] < 0.05 < other["kl"]["value"]
    assert quantized["perplexity"] / given["perplexity"] - 1 == pytest.approx(quantized["perplexity_change"]["value"])
    assert len(quantized["kl_by_window"]) == 3 and [len(ids) for ids in result["variants"][2]["answers"]["greedy"]]
    assert "<svg" in (tmp_path / "out" / "quality.svg").read_text()
    out = capfd.readouterr().out
    assert "attention=triton was skipped: " in out and "perplexity change" in out

    # The engine's own log-probabilities of the same windows.
    config = QualityConfig(windows=3, length=24, tokens=4)
    read = windows(config, documents(config), tokenizer)
    with LLM("tiny", overrides=CPU) as llm:
        found = llm.generate(read, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    nll = [-sum(entry.logprob for entry in one.prompt_logprobs) / 24 for one in found]
    assert result["variants"][0]["answers"]["nll"] == pytest.approx(nll, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "app=quality needs something to compare"),
        (("quality.vary={quant:[fp8]}", 'quality.variants=["quant=fp8"]'), "give one of them"),
        (("quality.vary={quality.windows:[2,3]}",), "cannot vary: the options of this app hold for all variants"),
        (('quality.variants=["quant=fp9"]',), "no such quant"),
        (('quality.variants=["quant=fp8","quant=fp8"]',), "composes to the same as quant=fp8"),
        (('quality.variants=["quant=fp8"]', "quality.tokens=24"), "leaves no prompt in windows"),
        (('quality.variants=["quant=fp8"]', "quality.length=64"), "quality.length=64: windows need a context of 66"),
        (('quality.variants=["quant=fp8"]', "quality.text=nowhere.txt"), "quality.text=nowhere.txt cannot be read"),
        (('quality.variants=["quant=fp8"]', "quality.reference_bytes=1000"), "lower quality.windows"),
        (('quality.variants=["executor=simulated"]',), "executor=simulated computes no logits"),
        (('quality.variants=["engine.dp=2"]',), "engine.dp=2: the logits of one replica are read"),
        (('quality.variants=["model=llama3_8b"]',), "its model has 128256 tokens, the reference's 4096"),
        (('quality.variants=["quant=fp8"]', "attention=triton"), "as given, the reference: attention=triton requires"),
    ],
)
def test_mistakes(words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["app=quality", *CPU, *SMALL, *words]) == 2
    assert reason in capsys.readouterr().err


def copy_of_tiny(folder: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """Return the override of a copy of the bundled model with a changed tokenizer."""
    shutil.copytree(TINY, folder)
    made = json.loads((folder / "tokenizer.json").read_text())
    change(made)
    (folder / "tokenizer.json").write_text(json.dumps(made))
    return f"model=llama model.path={folder}"


def test_the_same_tokens_may_be_made_by_other_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def other_rules(made: dict[str, Any]) -> None:
        made["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}

    def other_tokens(made: dict[str, Any]) -> None:
        vocab = made["model"]["vocab"]
        vocab["a"], vocab["e"] = vocab["e"], vocab["a"]

    same = copy_of_tiny(tmp_path / "same", other_rules)
    words = ["app=quality", *CPU, *SMALL, f"quality.out={tmp_path / 'out'}"]
    assert main([*words, f"quality.variants={json.dumps([same])}"]) == 0
    assert "splits the text otherwise; it is measured on the reference's tokens" in capsys.readouterr().err
    *_, variant = json.loads((tmp_path / "out" / "quality.json").read_text())["variants"]
    assert variant["figures"]["kl"]["value"] < 1e-8
    other = copy_of_tiny(tmp_path / "other", other_tokens)
    assert main([*words, f"quality.variants={json.dumps([other])}"]) == 2
    assert "its tokenizer has other tokens than the reference's" in capsys.readouterr().err


def test_a_failure_and_ctrl_c_keep_the_other_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = iter([answers(2.0, [0.0], [[1]]), DovetailError("no memory"), KeyboardInterrupt()])

    def scripted(*given: Any) -> Answers:
        outcome = next(outcomes)
        if isinstance(outcome, BaseException):
            raise outcome
        return Answers({"device": "cpu"}, outcome.rows, outcome.greedy)

    monkeypatch.setattr(measure_module, "measure", scripted)
    monkeypatch.setattr(app_module, "draw", lambda path, result: None)
    words = ["app=quality", *CPU, *SMALL, "quality.vary={quant:[fp8,int8]}", f"quality.out={tmp_path}"]
    assert main(words) == 130
    result = json.loads((tmp_path / "quality.json").read_text())
    given, failed, missing = result["variants"]
    assert result["interrupted"] and given["figures"]["perplexity"] and missing["figures"] is None
    assert failed["failure"] == "no memory" and "quant=fp8 failed: no memory" in capsys.readouterr().out


def test_nothing_is_measured_without_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any) -> Answers:
        raise DovetailError("no memory")

    monkeypatch.setattr(measure_module, "measure", failing)
    assert main(["app=quality", *CPU, *SMALL, "quality.vary={quant:[fp8]}"]) == 1
