"""Operations of drafters, which app=tune finds without weights."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.compose import compose
from dovetail.core.interfaces.tuning import Key
from dovetail.core.ops.packed_tiles import OP as PACKED
from dovetail.core.ops.tile_choice import OP, matmul_key
from dovetail.core.tuning.search import distinct
from dovetail.core.worker.build import tunables_without_weights

WORDS = ("model=llama3_8b", "model.load=dummy", "quant=fp8", "engine.dtype=bfloat16", "engine.max_len=1024")

LLAMA_1B = "spec_decode=draft_model", "model@spec_decode.model=llama32_1b"


def keys(*words: str) -> set[tuple[str, Key]]:
    found = distinct(tunables_without_weights(compose([*WORDS, *words]), torch.device("cpu"), [16]))
    assert {one.rows for one in found} == {16}
    return {(one.op, one.key) for one in found}


@pytest.fixture(scope="module")
def alone() -> set[tuple[str, Key]]:
    return keys()


@pytest.mark.parametrize(
    ("words", "outputs", "inputs"),
    [
        (("spec_decode=eagle3_llama3_8b",), 4096, 3 * 4096),  # the fusion of three features
        (("spec_decode=medusa_llama3_8b",), 4096, 4096),
        (LLAMA_1B, 2 * 8192, 2048),  # gate and up
        ((*LLAMA_1B, "engine.tp=2"), 8192, 2048),
        (
            ("spec_decode=draft_model", "model@spec_decode.model=llama32_1b", "engine.tp=2", "spec_decode.tp=1"),
            16384,
            2048,
        ),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else None,
)
def test_layers_of_a_drafter_are_measured_beside_the_models(alone, words, outputs, inputs):
    tp = [word for word in words if word.startswith("engine.tp")]
    of_model, both = alone if not tp else keys(*tp), keys(*words)
    assert of_model < both
    assert (OP, matmul_key("bf16", outputs, inputs)) in both - of_model


def test_the_quantizer_is_the_drafters(alone):
    new = keys("spec_decode=eagle3_llama3_8b", "quant@spec_decode.quant=w4a8") - alone
    assert {op for op, _ in new} >= {PACKED}


def test_drafters_without_layers_add_nothing(alone):
    assert keys("spec_decode=ngram") == alone
