"""The LoRA kernels against their torch reference, on random input and poisoned outputs.

They run compiled on a GPU, or in Triton's interpreter with TRITON_INTERPRET=1 (see tests/test_in_interpreter.py).
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from dovetail.core.testing.interpreter import mend_interpreter  # noqa: E402
from dovetail.core.testing.numeric import assert_near, poisoned_memory, same_bits  # noqa: E402
from dovetail.plugins.adapter.lora import kernel  # noqa: E402
from dovetail.plugins.adapter.lora.kernel import lora_triton, output_blocks  # noqa: E402
from dovetail.plugins.adapter.lora.reference import lora_reference  # noqa: E402

if INTERPRETED:
    mend_interpreter()

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# The interpreter truncates float32 to bfloat16 instead of rounding, so float16 replaces it there.
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def fresh_random_and_poison():
    torch.seed()
    with poisoned_memory():
        yield


def factors(slots: int, inputs: int, parts: tuple[int, ...], rank: int, dtype: torch.dtype):
    """Views of one store per slot, as in LoRA, surrounded by other numbers."""
    a_size, b_size = len(parts) * rank * inputs, sum(parts) * rank
    store_SN = torch.randn(slots, 64 + a_size + b_size + 64, device=DEVICE).to(dtype)
    a_SPRI = store_SN[:, 64 : 64 + a_size].unflatten(1, (len(parts), rank, inputs))
    b_SOR = store_SN[:, 64 + a_size : 64 + a_size + b_size].unflatten(1, (-1, rank))
    return a_SPRI, b_SOR


def both(x_TI, y_TO, a_SPRI, b_SOR, slots_T, parts):
    got, expected = y_TO.clone(), y_TO.clone()
    lora_triton(x_TI, got, a_SPRI, b_SOR, slots_T, output_blocks(parts, DEVICE))
    lora_reference(x_TI, expected, a_SPRI, b_SOR, slots_T, parts)
    return got, expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "inputs", "parts", "rank", "slots"),
    [(1, 200, (40,), 16, 1), (7, 96, (130, 8, 8), 16, 3), (33, 384, (64, 64), 32, 4), (150, 130, (300,), 64, 2)],
)
def test_equals_the_reference(tokens, inputs, parts, rank, slots, dtype):
    a_SPRI, b_SOR = factors(slots, inputs, parts, rank, dtype)
    # Strided input: every other row of a wider tensor.
    x_TI = torch.randn(tokens, 2, inputs, device=DEVICE).to(dtype)[:, 0]
    y_TO = torch.randn(tokens, sum(parts), device=DEVICE).to(dtype) * inputs
    slots_T = torch.randint(-1, slots, (tokens,), dtype=torch.int32, device=DEVICE)
    slots_T[0] = slots - 1
    got, expected = both(x_TI, y_TO, a_SPRI, b_SOR, slots_T, parts)
    assert_near(got, expected, TOLERANCE[dtype])
    assert same_bits(got[slots_T < 0], y_TO[slots_T < 0])


@pytest.mark.parametrize("programs", [1, 1 << 20], ids=["one program loops over slots", "one program per slot"])
def test_a_prompt_with_decode_rows(programs, monkeypatch):
    """One tile with many adapters, then tiles with one; with and without splits."""
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    parts, slots = (24, 200), 5
    a_SPRI, b_SOR = factors(slots, 130, parts, 16, torch.float32)
    slots_T = torch.tensor([0, -1, 4, 1, 1, 3, 0, -1] + [2] * 140, dtype=torch.int32, device=DEVICE)
    x_TI = torch.randn(len(slots_T), 130, device=DEVICE)
    y_TO = torch.randn(len(slots_T), sum(parts), device=DEVICE)
    got, expected = both(x_TI, y_TO, a_SPRI, b_SOR, slots_T, parts)
    assert_near(got, expected, 1e-5)
    assert same_bits(got[slots_T < 0], y_TO[slots_T < 0])


def test_a_slot_affects_only_its_rows():
    a_SPRI, b_SOR = factors(2, 64, (48,), 16, torch.float32)
    a_SPRI[1] = float("nan")
    slots_T = torch.tensor([0, 1, -1, 0], dtype=torch.int32, device=DEVICE)
    x_TI, y_TO = torch.randn(4, 64, device=DEVICE), torch.randn(4, 48, device=DEVICE)
    got, _ = both(x_TI, y_TO, a_SPRI, b_SOR, slots_T, (48,))
    assert got[slots_T != 1].isfinite().all() and got[1].isnan().all()


def test_no_rows():
    a_SPRI, b_SOR = factors(1, 64, (48,), 16, torch.float32)
    lora_triton(
        torch.empty(0, 64, device=DEVICE),
        torch.empty(0, 48, device=DEVICE),
        a_SPRI,
        b_SOR,
        torch.empty(0, dtype=torch.int32, device=DEVICE),
        output_blocks((48,), DEVICE),
    )
