"""The planner against numbers worked out by hand, and its remedies against itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
CODE = """
import sys
from dovetail.core.compose.cli import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules, "a plan needs no torch"
raise SystemExit(code)
"""


def plan(*overrides: str) -> dict[str, Any]:
    argv = [sys.executable, "-c", CODE, "app=plan", "plan.format=json", *overrides]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_llama3_70b_on_eight_h200() -> None:
    facts = plan("+preset=h200_bf16_tp8")
    sizes = facts["bytes_per_gpu"]
    assert sizes["weights"] == pytest.approx(70.55e9 * 2 / 8, rel=0.01)
    assert facts["kv_bytes_per_token"] == 327_680
    assert facts["kv_bytes_per_token_and_gpu"] == 327_680 // 8
    assert facts["fits"] and facts["sequences"]["131072"] == int(sizes["kv_cache"] // (131072 * 40960)) > 10
    used = sum(sizes[name] for name in ("weights", "activations", "context", "kv_cache"))
    assert used == pytest.approx(sizes["usable"])
    tpot = {row["batch"]: row["tpot_ms"] for row in facts["speed"]}
    # Reading this GPU's share of the weights alone takes 4 ms at 4.4 TB/s.
    assert 4.0 < tpot[1] < 12.0 and tpot[1] < tpot[64] < tpot[256]


def test_fp8_halves_weights_and_cache() -> None:
    bf16, fp8 = plan("+preset=h200_bf16_tp1"), plan("+preset=h200_fp8_tp1")
    assert fp8["kv_bytes_per_token"] == bf16["kv_bytes_per_token"] // 2
    # Embedding and logits stay in bfloat16: 1.05 of 8.03 billion parameters.
    assert fp8["bytes_per_gpu"]["weights"] == pytest.approx(6.98e9 + 2 * 1.05e9, rel=0.01)
    assert all(ours["tpot_ms"] < theirs["tpot_ms"] for ours, theirs in zip(fp8["speed"], bf16["speed"], strict=True))


def test_what_does_not_fit_gets_remedies_that_do() -> None:
    facts = plan("+preset=h200_bf16_tp1", "model=llama3_70b")
    assert not facts["fits"] and facts["missing_bytes"] > 0
    assert len(facts["remedies"]) == 3
    for remedy in facts["remedies"]:
        better = plan("+preset=h200_bf16_tp1", "model=llama3_70b", *remedy["overrides"].split())
        assert better["fits"], remedy
        assert better["sequences_of_max_len"] == remedy["sequences_of_max_len"] >= 1


@pytest.mark.parametrize("model", ["mixtral_8x7b", "mixtral_8x22b", "deepseek_v3", "llama31_405b", "qwen25_72b"])
def test_every_size_users_ask_about_can_be_planned(model: str) -> None:
    facts = plan("+preset=h200_bf16_tp8", f"model={model}")
    assert facts["parameters"] >= facts["active_parameters"] > 1e9
    assert facts["fits"] or facts["remedies"]


def test_a_plan_without_hardware_says_what_to_choose() -> None:
    argv = [sys.executable, "-c", CODE, "app=plan", "cost=none"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "cost=h200" in done.stderr, done.stderr
