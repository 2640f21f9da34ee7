"""Layers that launch the same kernels: a rank that only compiles runs one of each kind, and misses no kernel."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")

from triton.runtime.jit import JITFunction

from dovetail.core.compose import compose
from dovetail.core.layers import one_of_each
from dovetail.core.ops.kernels import launch
from dovetail.core.testing.executor_scripts import quiet
from dovetail.core.testing.no_gpu import no_gpu
from dovetail.core.worker.loader import load_rank
from dovetail.plugins.model.llama import decoder
from dovetail.plugins.model.llama.block import Block

SMALL = (
    "model=qwen25_7b model.load=dummy model.hf.num_hidden_layers=6 model.hf.hidden_size=448 model.hf.vocab_size=152064 "
    "model.hf.intermediate_size=512 model.hf.num_attention_heads=7 model.hf.num_key_value_heads=1 engine.kv_pages=400 "
    "engine.max_len=512 engine.max_seqs=16 engine.token_budget=128"
).split()
WINDOWS = ["model.hf.use_sliding_window=true", "++model.hf.sliding_window=128", "model.hf.max_window_layers=3"]
SPARSE = (
    "model=glm45_air model.hf.num_hidden_layers=4 model.hf.hidden_size=512 model.hf.intermediate_size=256 "
    "model.hf.num_attention_heads=4 model.hf.num_key_value_heads=2 model.hf.n_routed_experts=8 "
    "model.hf.num_experts_per_tok=2 model.hf.moe_intermediate_size=128 model.routing=uniform quant=fp8"
).split()
"""Experts after a layer with an MLP."""


@pytest.mark.parametrize(
    ("kinds", "kept", "found"),
    [
        ("aaaa", (), [0, 1]),
        ("aaaa", (3,), [0, 1, 3]),
        ("aaabbb", (), [0, 1, 2, 3, 4]),
        ("abababab", (), [0, 1, 2]),
        ("aabaac", (), [0, 1, 2, 3, 4, 5]),
        ("a", (), [0]),
    ],
)
def test_each_pair_of_neighbours_is_kept(kinds: str, kept: tuple[int, ...], found: list[int]) -> None:
    assert one_of_each(kinds, kept) == found


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(WINDOWS, marks=pytest.mark.nightly),
        pytest.param(["quant=fp8"], marks=pytest.mark.nightly),
        SPARSE,
    ],
    ids=["windows", "fp8", "experts"],
)
def test_one_layer_of_each_kind_launches_what_all_layers_do(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    base = [word for word in SMALL if words is not SPARSE or not word.startswith("model")]
    variants: set[tuple[str, Any]] = set()

    def record(kernel: Any, key: Any, *more: Any) -> None:
        variants.add((kernel.fn.__name__, key))

    def launched(of_each_kind: bool) -> tuple[set[tuple[str, Any]], int]:
        ran: list[int] = []
        block = Block.__call__
        with monkeypatch.context() as patched:
            patched.setattr(launch, "keep_shared_memory", lambda device: None)
            patched.setattr(JITFunction, "_do_compile", record)
            patched.setattr(decoder, "rehearsing", lambda: of_each_kind)
            patched.setattr(Block, "__call__", lambda self, *args: ran.append(1) or block(self, *args))
            variants.clear()
            with no_gpu():
                load_rank(compose([*base, *words, "+preset=h200_bf16_tp1"]), quiet)
        return set(variants), len(ran)

    some, few = launched(True)
    every, many = launched(False)
    assert some == every and len(every) > 20
    assert few < many
