"""A step run as two overlapping half-batches has the same logits, taps, keys and values, for ranks, formats, families.

The half-batches' matmuls have other sizes and add in another order.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dovetail.core.interfaces import Quantizer
from dovetail.core.testing.rank_threads import on_threads
from dovetail.core.worker.two_batch_overlap import OverlappedForward
from dovetail.plugins.adapter.config import LoRAConfig
from dovetail.plugins.adapter.lora.adapters import LoRA
from dovetail.plugins.quant.config import FP8Config
from dovetail.plugins.quant.fp8.quantizer import FP8

from .adapters import TARGETS, save_adapter
from .checkpoints import random_tokens, save_random
from .driver import CPU, Driver, load_model

SEQUENCES = {name: random_tokens(80, seed=seed) for seed, name in enumerate("abcd")}
STEPS = (
    ({"a": 41}, 0),  # split within the only chunk
    ({"a": 1, "b": 7, "c": 30}, 1),  # within the last of several chunks, with a decode row
    ({"a": 2, "b": 2, "c": 2, "d": 2}, 4),  # between rows with drafts
    ({"a": 1, "b": 1, "d": 20, "c": 5}, 2),  # within a middle chunk with a cached prefix
    ({"a": 3}, 1),  # a single decode row is not split
)


def run(model, halves: bool, lora: LoRA | None = None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return logits and taps of each step, and the contents of the cache."""
    torch.set_num_threads(1)
    driver, found = Driver(model), []
    turns, collective = [], model.build.collective
    if halves:
        forward = OverlappedForward(model, model.build.attention, lora, CPU, least=1)
        start = forward.side.start
        forward.side.start = lambda call: turns.append(collective.overlapped) or start(call)
        driver.forward = forward
    fed = dict.fromkeys(SEQUENCES, 0)
    for counts, num_decode in STEPS:
        rows = [(name, SEQUENCES[name][fed[name] : fed[name] + count]) for name, count in counts.items()]
        if lora is not None:
            each = [{"a": 0, "c": 1}.get(name, -1) for name, tokens in rows for _ in tokens]
            lora.slots_T = torch.tensor(each, dtype=torch.int32)
        found.append(torch.cat(driver.step(rows, num_decode, slack=2, taps=(0, 2))))
        found += [tap.clone() for tap in driver.hidden.taps.values()]
        for name, count in counts.items():
            fed[name] += count
    assert bool(turns) is halves and all(turns) and not collective.overlapped
    planes = [plane for pool in driver.paging.pools.values() for plane in pool.planes.values()]
    # Page 0 is scratch and never read.
    return found, [plane[:, 1:].float().nan_to_num(-7.0) for plane in planes]


def assert_equal(got, expected, atol: float = 1e-5) -> None:
    for one, other in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "variant", ["gqa", "mistral_window", "qwen2_window", "qwen3", "falcon_7b", "falcon_40b", "gptj"]
)
def test_families(variant, size, tmp_path):
    """Families with windows, layer groups with and without a window, parallel blocks with one norm and with two."""
    save_random(tmp_path, variant)

    def on(halves: bool) -> Callable:
        return lambda collective: run(load_model(tmp_path, collective=collective), halves)

    for got, expected in zip(on_threads(size, on(True)), on_threads(size, on(False)), strict=True):
        assert_equal(got, expected)


def test_fp8_activations(tmp_path):
    """Rounding to 8 bits occasionally turns a difference in the last place into a whole quantization step."""
    save_random(tmp_path, "gqa")

    def fp8() -> Quantizer:
        return FP8(FP8Config())

    got, expected = (run(load_model(tmp_path, quantizer=fp8()), halves) for halves in (True, False))
    plain = run(load_model(tmp_path), False)
    assert (expected[0][0] - plain[0][0]).std() > 0.01  # the results must differ, or nothing was quantized
    for one, other in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
        assert (one - other).norm() <= 1e-3 * other.norm()


def test_each_half_has_its_adapters(tmp_path):
    base, folders = tmp_path / "base", [tmp_path / name for name in ("first", "second")]
    reference = save_random(base, "gqa")
    for seed, folder in enumerate(folders):
        save_adapter(folder, reference, seed=seed, target_modules=TARGETS["llama"])

    def adapted(halves: bool):
        lora = LoRA(LoRAConfig(slots=2), CPU, torch.float32)
        model = load_model(base, adapters=lora)
        lora.allocate()
        for slot, folder in enumerate(folders):
            lora.read(folder.name, folder)
            lora.place(slot, folder.name)
        return run(model, halves, lora)

    expected = adapted(False)
    assert_equal(adapted(True), expected)
    plain = run(load_model(base), False)
    assert (expected[0][0] - plain[0][0]).std() > 0.05
