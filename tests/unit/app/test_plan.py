"""The planner compared with numbers computed by hand; its remedies checked with the planner itself."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.compose import Host, compose
from dovetail.core.compose.cli import main
from dovetail.core.errors import CapabilityError

ROOT = Path(__file__).parents[3]
CODE = """
import sys
from dovetail.core.compose.cli import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules, "a plan needs no torch"
raise SystemExit(code)
"""


def plan(*overrides: str) -> dict[str, Any]:
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["app=plan", "plan.format=json", *overrides]) == 0
    return json.loads(printed.getvalue())  # type: ignore[no-any-return]


def test_a_plan_needs_no_torch() -> None:
    words = ("app=plan", "plan.format=json", "+preset=h200_bf16_tp1", "adapter=lora", "adapter.slots=1")
    done = subprocess.run([sys.executable, "-c", CODE, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and json.loads(done.stdout) == plan(*words[2:]), done.stderr


def test_llama3_70b_on_eight_h200() -> None:
    facts = plan("+preset=h200_bf16_tp8")
    sizes = facts["bytes_per_gpu"]
    assert sizes["weights"] == pytest.approx(70.55e9 * 2 / 8, rel=0.01)
    assert facts["kv_bytes_per_token"] == 327_680
    assert facts["kv_bytes_per_token_and_gpu"] == 327_680 // 8
    assert facts["fits"] and facts["sequences"]["131072"] == int(sizes["kv_cache"] // (131072 * 40960)) > 10
    used = sum(sizes[name] for name in ("weights", "adapters", "drafter", "activations", "context", "kv_cache"))
    assert used == pytest.approx(sizes["usable"])
    tpot = {row["batch"]: row["tpot_ms"] for row in facts["speed"]}
    # Reading this GPU's share of the weights alone takes 4 ms at 4.4 TB/s.
    assert 4.0 < tpot[1] < 12.0 and tpot[1] < tpot[64] < tpot[256]


def test_fp8_halves_weights_and_cache() -> None:
    bf16, fp8 = plan("+preset=h200_bf16_tp1"), plan("+preset=h200_fp8_tp1")
    assert fp8["kv_bytes_per_token"] == bf16["kv_bytes_per_token"] // 2
    # Embedding and LM head stay in bfloat16: 1.05 of 8.03 billion parameters.
    assert fp8["bytes_per_gpu"]["weights"] == pytest.approx(6.98e9 + 2 * 1.05e9, rel=0.01)
    assert all(ours["tpot_ms"] < theirs["tpot_ms"] for ours, theirs in zip(fp8["speed"], bf16["speed"], strict=True))


def test_pages_that_are_set_bound_the_cache() -> None:
    facts = plan("cost=h200", "model=llama3_8b", "engine.kv_pages=100", "plan.lengths=[160,1000,1600,1601]")
    assert facts["bytes_per_gpu"]["kv_cache"] == 100 * 16 * facts["kv_bytes_per_token"]
    assert facts["sequences"] == {"160": 10, "1000": 1, "1600": 1, "1601": 0}
    assert facts["fits"] and facts["speed"][1]["fits"] is False
    # Layers with a window of 4096 have as many pages as the others.
    facts = plan("cost=h200", "model=command_r7b", "engine.kv_pages=1000", "plan.lengths=[1600,8000]")
    assert facts["sequences"] == {"1600": 10, "8000": 2}


def test_more_pages_than_the_memory_holds_do_not_fit(capsys) -> None:
    assert main(["app=plan", "cost=h200", "model=llama3_8b", "engine.kv_pages=100000"]) == 0
    assert "does not fit: engine.kv_pages=100000 lacks 84.79 GiB per GPU" in capsys.readouterr().out


PRESETS = sorted(file.stem for file in (ROOT / "conf" / "preset").glob("h200_*.yaml"))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_fits(preset: str) -> None:
    """On the GPUs in its name, with room for one sequence of the model's full context. The experts of `ep8` are spread
    over eight lanes."""
    facts = plan(f"+preset={preset}")
    assert facts["fits"] and facts["sequences_of_max_len"] >= 1 and facts["max_len"] >= 8192
    parts = [part.replace("ep", "dp") for part in preset.split("_")]
    named = {part[:2]: int(part[2:]) for part in parts if part[:2] in ("tp", "dp") and part[2:].isdigit()}
    assert facts["layout"] == {"tp": 1, "pp": 1, "dp": 1} | named
    assert facts["gpus"] == named.get("tp", 1) * named.get("dp", 1)
    assert facts["formats"]["kv_bytes"] == (2 if "bf16" in preset else 1)


def test_replicas_divide_the_work_and_add_up() -> None:
    one, eight = plan("+preset=h200_fp8_dp8", "engine.dp=1"), plan("+preset=h200_fp8_dp8")
    assert eight["bytes_per_gpu"] == one["bytes_per_gpu"] and eight["gpus"] == 8
    assert eight["sequences_of_max_len"] == 8 * one["sequences_of_max_len"]
    alone, spread = ({row["batch"]: row for row in facts["speed"]} for facts in (one, eight))
    assert spread[1]["tpot_ms"] == alone[1]["tpot_ms"], "a replica is no faster for having neighbours"
    assert spread[1]["output_tokens_per_s"] == alone[1]["output_tokens_per_s"]
    assert alone[16]["tpot_ms"] < spread[256]["tpot_ms"] < alone[64]["tpot_ms"]
    assert spread[256]["output_tokens_per_s"] == pytest.approx(256 / spread[256]["tpot_ms"] * 1e3)
    # Tensor parallelism lowers the latency of one request; replicas raise the throughput of many.
    ranks = {row["batch"]: row for row in plan("+preset=h200_fp8_tp8")["speed"]}
    assert ranks[1]["tpot_ms"] < spread[1]["tpot_ms"] / 2


def test_replicas_too_big_for_their_gpus_become_fewer() -> None:
    facts = plan("+preset=h200_fp8_dp8", "model=llama31_405b")
    assert not facts["fits"]
    words = [remedy["overrides"] for remedy in facts["remedies"]]
    assert any("engine.tp=4 engine.dp=2" in text or "engine.tp=8 engine.dp=1" in text for text in words), words
    for remedy in facts["remedies"]:
        assert plan("+preset=h200_fp8_dp8", "model=llama31_405b", *remedy["overrides"].split())["fits"], remedy


def test_slots_of_adapters_take_their_share() -> None:
    """Rank 16 of Llama 3 8B: 16 x (inputs + outputs) of seven matrices in 32 layers, in bfloat16."""
    without, one = plan("+preset=h200_bf16_tp1"), plan("+preset=h200_bf16_tp1", "adapter=lora", "adapter.slots=1")
    each = 2 * 16 * 32 * (2 * 8192 + 2 * 5120 + 3 * (4096 + 14336))
    assert without["bytes_per_gpu"]["adapters"] == 0 and one["bytes_per_gpu"]["adapters"] == each
    assert one["bytes_per_gpu"]["kv_cache"] == pytest.approx(without["bytes_per_gpu"]["kv_cache"] - each)
    eight = plan("+preset=h200_bf16_tp1", "adapter=lora", "adapter.slots=8", "adapter.max_rank=32")
    assert eight["bytes_per_gpu"]["adapters"] == 16 * each
    shared = plan("+preset=h200_bf16_tp8", "model=llama3_8b", "adapter=lora", "adapter.slots=1")
    # Not sharded, thus full on each rank: inputs of q, k, v, gate and up, outputs of o and down.
    assert shared["bytes_per_gpu"]["adapters"] == 2 * 16 * 32 * (7 * 4096 + 2 * 512 + 2 * 128 + 3 * 1792)


def test_a_plan_counts_what_adapters_take() -> None:
    import torch

    from dovetail.core.worker.loader import load_rank

    rank = load_rank(compose(["app=generate", "adapter=lora", "engine.kv_pages=64"]), lambda phase, share: None)
    tensors = (value for value in vars(rank.parts.adapters).values() if isinstance(value, torch.Tensor))
    taken = sum(tensor.nbytes for tensor in tensors)
    rank.close()
    assert (
        plan("cost=cpu", "cost.memory=8", "adapter=lora", "engine.dtype=float32")["bytes_per_gpu"]["adapters"] == taken
    )


def test_experts_of_the_layer_that_predicts_further_tokens_are_placed_like_the_models() -> None:
    """Eight lanes share them: each has an eighth, where each of eight replicas has all."""

    def drafter(*words: str) -> float:
        base = ("model=deepseek_v3", "cost=h200", "quant=fp8_block", "spec_decode=mtp")
        return float(plan(*base, *words)["bytes_per_gpu"]["drafter"])

    lanes = drafter("engine.dp=8", "engine.ep=8", "experts=gather")
    apart, ranks = drafter("engine.dp=8"), drafter("engine.tp=8")
    assert ranks == pytest.approx(apart / 8, rel=0.01) and ranks < lanes < 0.3 * apart
    assert drafter("engine.tp=2", "engine.dp=4", "engine.ep=8", "experts=gather") < lanes


def test_a_drafter_takes_its_share() -> None:
    """Llama 3 8B drafts for 70B on eight GPUs: weights in bfloat16 or FP8, 128 KiB of KV per token, and logits after
    each draft."""
    words = ["+preset=h200_bf16_tp8", "engine.token_budget=8192", "engine.max_seqs=256"]
    drafts = ["spec_decode=draft_model", "model@spec_decode.model=llama3_8b"]
    plain, drafted = plan(*words), plan(*words, *drafts)
    sizes = drafted["bytes_per_gpu"]
    assert sizes["drafter"] == pytest.approx(8.03e9 * 2 / 8, rel=0.01) and plain["bytes_per_gpu"]["drafter"] == 0
    assert drafted["draft_kv_bytes_per_token"] == 131_072
    per_token = drafted["kv_bytes_per_token_and_gpu"] + 131_072 // 8
    assert drafted["sequences"]["4096"] == int(sizes["kv_cache"] // (4096 * per_token)) < plain["sequences"]["4096"]
    assert sizes["activations"] == 256 * 5 * 128_256 * 4 * 5
    fp8 = plan(*words, *drafts, "quant@spec_decode.quant=fp8", "spec_decode.verify=rejection")
    probs = 257 * 4 * 128_256 * 4
    assert 0.5 < (fp8["bytes_per_gpu"]["drafter"] - probs) / sizes["drafter"] < 0.6
    whole = plan(*words, *drafts, "spec_decode.tp=1")
    assert whole["bytes_per_gpu"]["drafter"] == pytest.approx(8 * sizes["drafter"])
    lost = sizes["kv_cache"] - whole["bytes_per_gpu"]["kv_cache"]
    assert lost == pytest.approx(7 * sizes["drafter"])
    per_token = drafted["kv_bytes_per_token_and_gpu"] + 131_072
    assert whole["sequences"]["4096"] == int(whole["bytes_per_gpu"]["kv_cache"] // (4096 * per_token))


def test_the_predicted_speed_is_marked_as_that_without_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    """How many drafts a model accepts is not known before it runs."""
    for drafter in ("none", "ngram"):
        assert main(["app=plan", "+preset=h200_fp8_tp1", f"spec_decode={drafter}"]) == 0
        assert ("what spec_decode=ngram gains is not predicted" in capsys.readouterr().out) == (drafter == "ngram")


def test_a_layer_for_multi_token_prediction_takes_its_share() -> None:
    """DeepSeek-V3's has 11.5 B weights in FP8, and a latent of 576 values per token."""
    words = ["model=deepseek_v3", "quant=fp8", "engine.tp=8", "cost=h200"]
    plain, drafted = plan(*words), plan(*words, "spec_decode=mtp")
    assert drafted["bytes_per_gpu"]["drafter"] == pytest.approx(11.5e9 / 8, rel=0.01)
    assert drafted["draft_kv_bytes_per_token"] == 576 * 2
    assert drafted["sequences"]["16384"] < plain["sequences"]["16384"]


def test_fewer_slots_are_a_remedy() -> None:
    words = ["+preset=h200_bf16_tp1", "adapter=lora", "adapter.slots=64", "adapter.max_rank=64", "cost.memory=40"]
    facts = plan(*words)
    told = [remedy["overrides"] for remedy in facts["remedies"]]
    (slots,) = [text for text in told if text.startswith("adapter.slots=")]
    assert not facts["fits"]
    assert plan(*words, slots)["fits"], f"{slots} is few enough"
    more = 2 * int(slots.partition("=")[2])
    assert not plan(*words, f"adapter.slots={more}")["fits"], f"{more} would do, too"


def test_what_does_not_fit_gets_remedies_that_do() -> None:
    facts = plan("+preset=h200_bf16_tp1", "model=llama3_70b")
    assert not facts["fits"] and facts["missing_bytes"] > 0
    assert len(facts["remedies"]) == 3
    for remedy in facts["remedies"]:
        better = plan("+preset=h200_bf16_tp1", "model=llama3_70b", *remedy["overrides"].split())
        assert better["fits"], remedy
        assert better["sequences_of_max_len"] == remedy["sequences_of_max_len"] >= 1


@pytest.mark.parametrize(
    "words",
    [
        ["+preset=h200_fp8_tp8", "engine.tp=6"],
        ["+preset=h200_fp8_tp8", "engine.tp=128"],
        ["model=tiny", "cost=h200", "engine.tp=3"],
        ["model=mixtral_8x7b", "cost=h200", "engine.tp=3"],
        ["model=tiny", "cost=h200", "engine.pp=2"],
    ],
    ids=" ".join,
)
def test_a_layout_that_the_model_cannot_have_is_refused_as_at_start(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["app=plan", *words]) == 2
    told, printed = capsys.readouterr().err.splitlines()[1:], capsys.readouterr().out
    with pytest.raises(CapabilityError) as caught:
        compose([word for word in words if not word.startswith("cost=")], app="generate").check(Host())
    assert len(told) == 1 and told[0].removeprefix("  - ") in caught.value.conflicts and not printed
    ranks = told[0].partition("Would work: ")[2].rstrip(".").split(" or ")
    assert main(["app=plan", *words, ranks[-1].replace(" at most ", "=")]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=deepseek_v2_lite", "attention=flashinfer"], "attention with mla among kinds .*attention=triton"),
        (["model=llama3_8b", "experts=whole"], "model with expert_placement true .*Would work: experts=tensor"),
    ],
)
def test_parts_that_no_host_can_join_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["app=plan", "cost=h200", *words]) == 2
    assert re.search(message, capsys.readouterr().err)


THREES = [
    "model=llama3_70b",
    *(
        f"model.hf.{key}={value}"
        for key, value in {
            "hidden_size": 6144,
            "num_attention_heads": 48,
            "num_key_value_heads": 6,
            "intermediate_size": 27648,
        }.items()
    ),
]
"""Allows 1, 2, 3, 6, 12, 24 or 48 ranks: 4, 8 and 16 divide heads and channels, but not the 6 kv heads."""


@pytest.mark.parametrize(("gigabytes", "layouts"), [(80, {2}), (40, {3}), (20, {6}), (14, {12})])
def test_remedies_have_as_many_ranks_as_the_model_takes(gigabytes: int, layouts: set[int]) -> None:
    words = ["+preset=h200_bf16_tp1", *THREES, f"cost.memory={gigabytes}", "engine.max_len=2048", "engine.max_seqs=256"]
    facts = plan(*words)
    told = [remedy["overrides"] for remedy in facts["remedies"]]
    ranks = {int(n) for text in told for n in re.findall(r"engine\.tp=(\d+)", text)}
    assert not facts["fits"] and ranks and ranks <= layouts, told
    for text in told:
        assert plan(*words, *text.split())["fits"], text


def test_replicas_become_as_many_ranks_as_the_model_takes() -> None:
    words = ["+preset=h200_fp8_dp8", *THREES, "engine.dp=12", "cost.memory=32"]
    (text,) = (r["overrides"] for r in plan(*words)["remedies"] if "engine.dp" in r["overrides"])
    assert text == "engine.tp=3 engine.dp=4 executor=multiproc"


@pytest.mark.parametrize("model", ["mixtral_8x7b", "mixtral_8x22b", "deepseek_v3", "llama31_405b", "qwen25_72b"])
def test_every_size_users_ask_about_can_be_planned(model: str) -> None:
    facts = plan("+preset=h200_bf16_tp8", f"model={model}")
    assert facts["parameters"] >= facts["active_parameters"] > 1e9
    assert facts["fits"] or facts["remedies"]


def test_experts_over_ranks_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek-V3 on eight GPUs: a GPU has whole experts, or all of them in part; the busiest one is waited for."""
    words = ["model=deepseek_v3", "cost=h200", "quant=fp8", "executor=multiproc", "engine.tp=8"]
    cut, whole, sent, groups = (
        plan(*words, *more.split())
        for more in ("", "experts=whole", "experts=all_to_all", "experts=gather engine.ep=4")
    )
    assert [(p["experts"]["per_gpu"], p["experts"]["parts"]) for p in (cut, whole, sent, groups)] == [
        (256, 8),
        (32, 1),
        (32, 1),
        (64, 2),
    ]
    assert cut["bytes_per_gpu"]["weights"] == whole["bytes_per_gpu"]["weights"]
    shared = 58 * 3 * 7168 * 2048 * 7 / 8  # one byte per weight
    more = sent["bytes_per_gpu"]["weights"] - whole["bytes_per_gpu"]["weights"]
    assert more == pytest.approx(shared, rel=0.01)
    moved = [p["experts"]["exchange_bytes_per_token"] for p in (cut, whole, groups, sent)]
    assert moved[0] == moved[1] == moved[2] > moved[3] > 0
    assert whole["speed"][1]["tpot_ms"] > cut["speed"][1]["tpot_ms"]
    copied = plan(*words, "experts=whole", "experts.redundant=32")
    assert (copied["experts"]["per_gpu"], copied["experts"]["redundant"]) == (36, 32)
    each = 58 * 3 * 7168 * 2048  # an expert of every layer
    assert copied["bytes_per_gpu"]["weights"] - whole["bytes_per_gpu"]["weights"] == pytest.approx(4 * each, rel=1e-3)
    moving = plan(*words, "experts=whole", "experts.redundant=32", "experts.rebalance=100")
    more = moving["bytes_per_gpu"]["weights"] - copied["bytes_per_gpu"]["weights"]
    assert more == pytest.approx(2 * each / 58, rel=1e-3)
    assert main(["app=plan", *words, "experts=whole", "engine.ep=3"]) == 2
    assert "engine.ep=3 does not divide engine.tp=8 ranks. Would work: engine.ep=1" in capsys.readouterr().err


def test_lanes_share_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek-V3 in eight lanes: experts as over eight ranks, attention whole on each GPU, latents on one alone."""
    words = ["model=deepseek_v3", "cost=h200", "quant=fp8", "executor=multiproc", "plan.batches=[1,512]"]
    eight = plan(*words, "engine.tp=8", "experts=gather")
    lanes = plan(*words, "engine.dp=8", "engine.ep=8", "experts=gather")
    mixed = plan(*words, "engine.tp=2", "engine.dp=4", "engine.ep=8", "experts=all_to_all")
    assert lanes["experts"] | {"lanes": 1, "exchange_bytes_per_token": 0} == eight["experts"] | {
        "exchange_bytes_per_token": 0
    }
    assert mixed["experts"]["lanes"] == 4 and mixed["experts"]["per_gpu"] == 32
    attention = 61 * (7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168)
    dense, tables = 3 * 3 * 7168 * 18432, 2 * 129280 * 7168 * 2
    more = lanes["bytes_per_gpu"]["weights"] - eight["bytes_per_gpu"]["weights"]
    assert more == pytest.approx((attention + dense + tables) * 7 / 8, rel=0.02)
    assert lanes["sequences"]["4096"] > 4 * eight["sequences"]["4096"]
    assert lanes["speed"][0]["tpot_ms"] > eight["speed"][0]["tpot_ms"]
    assert lanes["speed"][1]["tpot_ms"] < eight["speed"][1]["tpot_ms"]
    assert main(["app=plan", *words, "engine.dp=8", "engine.ep=8", "experts=whole"]) == 2
    assert "experts=whole needs every row" in capsys.readouterr().err


def test_a_plan_without_hardware_says_what_to_choose() -> None:
    argv = [sys.executable, "-c", CODE, "app=plan", "cost=none"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "cost=h200" in done.stderr, done.stderr
