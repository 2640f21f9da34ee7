"""A start that cannot succeed fails early: before torch is imported, or before weights are loaded."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dovetail import LLM, SamplingParams
from dovetail.core import host
from dovetail.core.checkpoint import locate
from dovetail.core.compose import Host, compose
from dovetail.core.engine.checks import check_fit, check_weights_fit
from dovetail.core.engine.engine import start_engine
from dovetail.core.errors import CapabilityError, CapacityError, ConfigError, RequestError
from dovetail.core.interfaces import Model
from dovetail.plugins.executor.simulated import SimulatedExecutor
from dovetail.plugins.model.llama.families import spec_of

CODE = """
import sys
from dovetail.core.compose.cli import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules, "torch was imported before the mistake was found"
raise SystemExit(code)
"""


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=llama", "model.path=/no/such/folder"], ["model.path=", "model.load=dummy"]),
        (["model=llama"], ["model.path=", "model.load=dummy"]),
        (["generate.prompts=/no/such/file"], ["/no/such/file"]),
        (["generate.temperature=-1"], ["temperature"]),
        (["generate.max_token=3"], ["max_tokens"]),
    ],
    ids=str,
)
def test_mistakes(overrides: list[str], words: list[str], tmp_path: Path) -> None:
    argv = [sys.executable, "-c", CODE, *overrides]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_model_that_cannot_run_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(CapabilityError) as caught:
        start_engine(compose(["model=deepseek_v3", "attention=flashinfer", "engine.kv_dtype=fp8_e5m2"]))
    latents = next(one for one in caught.value.conflicts if "mla" in one)
    assert "model=llama requires attention with mla among kinds" in latents
    assert "attention=flashinfer has ('full', 'window'). Would work: attention=sdpa" in latents
    assert any("engine.kv_dtype" in one and "its latents have these formats" in one for one in caught.value.conflicts)


def test_all_conflicts_with_the_engine_options_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    composition = compose(["spec_decode=ngram", "engine.depth=2", "engine.device=cpu", "engine.overlap_tokens=64"])
    check_fit(composition)
    monkeypatch.setattr(composition.part("spec_decode").target(), "needs_host_tokens", True)
    monkeypatch.setattr(composition.part("model").target(), "layers", Model.layers)
    with pytest.raises(CapabilityError) as caught:
        check_fit(composition)
    drafts, halves = caught.value.conflicts
    assert "spec_decode=ngram drafts from tokens on the host" in drafts and "Would work: engine.depth=1." in drafts
    assert "model=" in halves and "Would work: engine.overlap_tokens=0." in halves


def test_a_broken_tokenizer_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    """Also where a grammar component would read the file first."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(locate(compose([]).part("model").config.path) / name)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        start_engine(compose(["model=llama", f"model.path={tmp_path}", "engine.device=cpu", "grammar=llguidance"]))


def test_late_launches_need_a_depth_of_two() -> None:
    words = ("engine.late_launch=true", "engine.device=cpu")
    for depth in (1, 3):
        with pytest.raises(
            CapabilityError, match=rf"engine\.depth={depth} .*Would work: engine\.depth=2, engine\.late"
        ):
            check_fit(compose([*words, f"engine.depth={depth}"]))
    check_fit(compose([*words, "engine.depth=2"]))


def gpu(gigabytes: float) -> Host:
    return Host(device="cuda", device_count=8, compute_capability=(9, 0), memory_bytes=int(gigabytes * 1e9))


def check(memory: float, *words: str) -> None:
    composition = compose(["model=llama3_8b", "engine.memory_fraction=0.9", *words], app="generate")
    check_weights_fit(composition, spec_of(composition.part("model").config), gpu(memory))


@pytest.mark.parametrize(
    ("memory", "settings"),
    [
        (17.5, {"engine.memory_fraction=0.95", "quant=int8", "quant=fp8"}),
        (12, {"quant=int8", "quant=fp8", "engine.tp=2 executor=multiproc"}),
        (6, {"engine.tp=4 executor=multiproc", "engine.tp=2 executor=multiproc quant=int8"}),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_settings_that_would(memory: float, settings: set[str]) -> None:
    """The weights are 16.06 GB of bfloat16. Each proposed setting passes the same check."""
    with pytest.raises(CapacityError, match="LlamaForCausalLM has 1[45].* GiB of weights a device") as caught:
        check(memory)
    assert caught.value.missing_bytes == pytest.approx(16.06e9 - 0.9 * memory * 1e9, rel=0.01)
    assert len(caught.value.settings) == 3 and settings <= set(caught.value.settings)
    for words in caught.value.settings:
        check(memory, *words.split())


def test_copies_of_weights_that_do_not_fit_are_left_out() -> None:
    """8B in 4 bits takes 4 GB beside 2.1 of embedding and logits, and the copy 7."""
    words = "quant=w4a8", "quant.many_rows=kept"
    check(16, *words)
    with pytest.raises(CapacityError) as caught:
        check(12, *words)
    assert "quant.many_rows=rounded" in caught.value.settings
    check(12, *words, "quant.many_rows=rounded")


def test_proposed_settings_respect_the_model_s_rank_counts() -> None:
    """With 48 heads and 6 KV heads 3 ranks are possible and 4 are not, although 4 would fit."""
    words = ["model.hf.num_attention_heads=48", "model.hf.num_key_value_heads=6", "model.hf.hidden_size=6144"]
    words += ["model.hf.intermediate_size=27648"]
    with pytest.raises(CapacityError) as caught:
        check(9, *words, "quant=int8")
    assert "engine.tp=3 executor=multiproc" in caught.value.settings, caught.value.settings


def test_a_rank_has_its_experts_and_their_copies() -> None:
    """DeepSeek-V3 in FP8 on eight GPUs: 84 GB each; copies of a quarter of the experts add 20. A lane has an eighth of
    the experts and all other layers."""
    whole = "model=deepseek_v3", "quant=fp8", "executor=multiproc", "engine.tp=8", "experts=whole"
    check(100, *whole)
    with pytest.raises(CapacityError) as caught:
        check(100, *whole, "experts.redundant=64")
    assert caught.value.missing_bytes == pytest.approx(14.5e9, rel=0.1)
    lanes = "model=deepseek_v3", "quant=fp8", "engine.dp=8", "engine.ep=8", "experts=gather"
    check(115, *lanes)
    with pytest.raises(CapacityError):
        check(115, *lanes, "experts.redundant=64")


def test_weights_that_fit_pass() -> None:
    check(18)


def test_weights_are_checked_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "detect_host", lambda device: Host(memory_bytes=1 << 20))
    phases: list[str] = []
    with pytest.raises(CapacityError, match="GiB of weights"):
        start_engine(compose(["engine.device=cpu"]), lambda phase, share: phases.append(phase))
    assert phases == []


def test_a_start_with_too_long_a_context_adds_a_note() -> None:
    engine = start_engine(compose(["+preset=tiny_cpu", "engine.max_len=1000000"]))
    engine.shutdown()
    assert engine.info.max_len == engine.info.spec.max_len < 1000000
    note = f"engine.max_len=1000000, and the model was made for {engine.info.max_len}"
    assert any(note in found for found in engine.info.notes)


@pytest.mark.parametrize(
    ("cost", "gpu", "advice"),
    [
        ("h200", "NVIDIA H200", None),
        ("h200", "NVIDIA H100 80GB HBM3", "set cost=h100"),
        ("cpu", "NVIDIA A100-SXM4-80GB", "set cost=a100"),
        ("h200", "NVIDIA GH200 480GB", "of a100, cpu, h100, h200, l40s none is for it, so set cost=roofline with"),
        ("none", "NVIDIA H100 80GB HBM3", None),
        ("h200 cost.device=null", "NVIDIA H100 80GB HBM3", None),
        ("h200", "cpu", None),
        ("h200", "simulated", None),
    ],
)
def test_a_cost_model_of_another_gpu_adds_a_note(
    monkeypatch: pytest.MonkeyPatch, cost: str, gpu: str, advice: str | None
) -> None:
    """The simulated executor stands for one on a GPU."""
    start = SimulatedExecutor.start
    monkeypatch.setattr(SimulatedExecutor, "start", lambda self, progress: replace(start(self, progress), device=gpu))
    engine = start_engine(compose(["engine.device=cpu", "executor=simulated", *f"cost={cost}".split()]))
    engine.shutdown()
    found = [note for note in engine.info.notes if "this GPU is" in note]
    if advice is None:
        assert found == []
    else:
        (note,) = found
        device = cost.upper() if cost != "cpu" else "cpu"
        assert note.startswith(f"cost={cost} is for {device}, and this GPU is {gpu}: ") and f"; {advice}" in note


def test_without_max_tokens_the_output_ends_where_the_cache_does() -> None:
    """Also where the cache is smaller than the context; the start reports it."""
    with LLM("tiny", overrides=["engine.device=cpu", "engine.kv_pages=6", "engine.token_budget=16"]) as llm:
        (note,) = (note for note in llm.info.notes if "engine.kv_pages" in note)
        longest = int(re.search(r"at most (\d+) tokens", note)[1])  # type: ignore[index]
        (answer,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=None, ignore_eos=True, temperature=0))
        assert answer.completions[0].finish_reason == "length"
        assert 3 + len(answer.token_ids) == longest < llm.info.max_len
        with pytest.raises(RequestError, match="raise engine.kv_pages"):
            llm.generate([[1] * longest], SamplingParams(max_tokens=None))


@pytest.mark.parametrize(("capability", "refused"), [((7, 5), True), ((8, 0), False), ((10, 0), False)])
def test_gpus_without_kernels_are_refused(
    capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Host(device="cuda", device_count=1, compute_capability=capability, memory_bytes=1 << 36)
    monkeypatch.setattr(host, "detect_host", lambda device: here)
    try:
        check_fit(compose(["app=generate", "attention=sdpa"]))
        found = ""
    except CapabilityError as error:
        found = str(error)
    assert ("compute capability 7.5, and kernels are for 8.0 (Ampere) and newer" in found) is refused


def test_collections_of_garbage_leave_out_what_an_engine_loaded():
    """A full collection would stop its steps for long."""
    gc.unfreeze()  # another test's engine may run
    with LLM(overrides=["model=tiny", "engine.device=cpu", "engine.kv_pages=16"]):
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0
