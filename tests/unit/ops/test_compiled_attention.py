"""Attention compiled for Hopper, without a GPU: registers, barriers, early accesses, and when other kernels run."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from dataclasses import replace

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

import torch

from dovetail.core.interfaces import HostBounds
from dovetail.core.testing.compiling import compiled_for_hopper, resources
from dovetail.plugins.attention.triton.gpu import has_hopper

from .attention_launches import CHUNKS, LONG, MIXED, SCARCE, attention
from .early_access import touched_before_waiting
from .emulated import BF16, E4M3, EVERYTHING
from .latent_launches import DRAFTS, PROMPT, attend
from .launches import CASES

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("kernel_cache")]


def test_prompts_keep_scores_and_sums_in_registers_and_await_what_they_fetch():
    """One or two values from the start of a program may be spilled, but no loop-carried values."""
    with compiled_for_hopper() as compiled:
        attend(PROMPT, 16, E4M3)
        CASES["attention: prompts, window, head scales"]()
        if EVERYTHING:
            attention(CHUNKS, page=64)
            CASES["attention: prompts, long"]()
            attention(LONG, page=64, window=1024)
    prompts = [kernel for name, kernel in compiled.kernels if name.endswith(":attend_prompts")]
    assert len(prompts) == (5 if EVERYTHING else 2)
    for kernel in prompts:
        ptx = kernel.asm["ptx"]
        assert resources(kernel).stack <= 16 and "wgmma" in ptx
        # A box has 64 x 64 values of 16 bits. If barriers awaited another number of bytes, the kernel would hang.
        awaited = [int(number) for number in re.findall(r"expect_tx.*\], (\d+);", ptx)]
        assert sum(awaited) == 8192 * ptx.count("cp.async.bulk.tensor") > 0


def test_a_nan_among_queries_of_8_bit_latents_is_no_greatest_number():
    """Numbers beyond float16 become its greatest one."""
    with compiled_for_hopper() as compiled:
        attend(DRAFTS, 16, E4M3)
    (kernel,) = (kernel for name, kernel in compiled.kernels if name.endswith(":attend_latents_hopper"))
    ptx = kernel.asm["ptx"]
    # Each thread of two warp groups has 64 x 256 queries over 128 threads.
    assert ptx.count("min.NaN.f32") == ptx.count("max.NaN.f32") == 2 * 128


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_single_tokens_keep_their_sums_in_registers_and_fetch_keys_before_they_rotate_queries(kv_dtype):
    with compiled_for_hopper() as compiled:
        attention(SCARCE, kv_dtype=kv_dtype, page=32)
    (kernel,) = (kernel for name, kernel in compiled.kernels if name.endswith(":attend_decode"))
    assert resources(kernel).stack <= 16
    # Keys are fetched before the preceding kernel, which writes queries, has ended.
    assert {"k_ptr", "v_ptr"} < touched_before_waiting(kernel)
    after = kernel.asm["ptx"].split("griddepcontrol.wait")[1]
    first_float = re.search(r"\b(?:mul|add|fma|sub)\.(?:rn\.)?f32", after)
    assert "ld.global" in after[: first_float.start()]
    assert re.search(r"ldmatrix\S*\.trans", after), "values are transposed on the way to the tensor cores"
    assert after.count(", 2147483647,") >= 2, "outputs and logarithms equal to EMPTY are sent as another NaN"
    # A thread issues all its loads of four ranges before it checks any.
    (look,) = re.findall(r"more:(.*?)setp", after, re.DOTALL)
    assert look.count("ld.relaxed.gpu.global.v4") == 4 * (2 + 1), "two columns, and the logarithms of both"


@pytest.mark.parametrize("heads", [(32, 8, 128), pytest.param((8, 8, 64), marks=pytest.mark.nightly)])
def test_rows_with_drafts_keep_their_sums_in_registers_and_wait_for_their_keys(heads):
    with compiled_for_hopper() as compiled:
        attention(HostBounds((9,) * 64, (640,) * 64, 64), kv_dtype=E4M3, page=32, heads=heads)
    (kernel,) = (kernel for name, kernel in compiled.kernels if name.endswith(":attend_decode"))
    assert resources(kernel).stack <= 16
    assert touched_before_waiting(kernel) == {"items_ptr", "first_pages_ptr"}


@pytest.mark.nightly
def test_single_tokens_in_mixed_steps_wait_for_the_keys_that_another_kernel_writes():
    with compiled_for_hopper() as compiled:
        attention(MIXED, kv_dtype=E4M3, page=32)
    (kernel,) = (kernel for name, kernel in compiled.kernels if name.endswith(":attend_decode"))
    assert touched_before_waiting(kernel) == {"items_ptr", "first_pages_ptr"}


def test_tree_masks_and_gluon_false_use_the_kernel_for_all_gpus():
    tree = HostBounds((4,) * 16 + (448,), (4096,) * 17, 16)
    with compiled_for_hopper(machine_code=False) as compiled:
        attention(tree, page=64)
        assert any(name.endswith(":attend_prompts") for name in compiled.functions), "without a tree it is served"
        compiled.functions.clear()
        attention(tree, page=64, gluon=False)
        attention(replace(tree, counts=(1,) * 16 + (448,), decode_width=4), page=64, tree=True)
        assert not any(name.endswith(":attend_decode") for name in compiled.functions)
        assert any(name.endswith(":attend_prompts") for name in compiled.functions), "prompts beside trees are causal"


def test_an_unsupported_gluon_is_logged(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "dovetail.plugins.attention.triton.hopper.launch", None)
    monkeypatch.delattr("dovetail.plugins.attention.triton.hopper.launch", raising=False)
    with compiled_for_hopper():
        assert not has_hopper.__wrapped__(torch.device("cuda"))
    assert "prompts, single tokens and latents use the kernels for all GPUs" in caplog.text
