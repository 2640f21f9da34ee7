"""Contract suite for adapters (Adapters and LayerAdapters). Authors subclass:

class TestMine(AdaptersContract):
    def make(self, device, dtype):
        return MyAdapters(MyConfig(slots=2), device, dtype)

    def save(self, folder, matrices, seed):
        write_my_format(folder, {name: random_change(outputs, inputs) for name, (outputs, inputs) in matrices.items()})

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from dovetail.core.errors import RequestError
from dovetail.core.interfaces import PLAIN, Activation, Adapters, Bundle, Collective, ModelSpec, Partial
from dovetail.core.layers import ColumnParallel, Linear, QKVParallel, RowParallel, load_weights
from dovetail.core.testing.host_sync import NoHostSync
from dovetail.core.testing.model_driver import Alone, Lazy, build_context
from dovetail.core.testing.numeric import TOLERANCE, assert_near, fresh, same_bits

__all__ = ["AdaptersContract"]

HIDDEN, HEADS, KV_HEADS, DIM, FFN = 64, 4, 2, 16, 96
MATRICES = {
    "layer.q": (HEADS * DIM, HIDDEN),
    "layer.k": (KV_HEADS * DIM, HIDDEN),
    "layer.v": (KV_HEADS * DIM, HIDDEN),
    "layer.o": (HIDDEN, HEADS * DIM),
    "layer.gate": (FFN, HIDDEN),
    "layer.up": (FFN, HIDDEN),
    "layer.down": (HIDDEN, FFN),
}
"""Checkpoint prefix -> (outputs, inputs)."""
SPEC = ModelSpec("contract", 16, 1, HIDDEN, HEADS, KV_HEADS, DIM, FFN, 64, "float32")


class AdaptersContract:
    """Tests of the rules of dovetail.core.interfaces.adapter on the layers of one block."""

    device = "cpu"
    """Device to test on, for instance "cuda"."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    """Model dtypes to test."""
    seed: int | None = None
    """Random seed; None = a fresh one for each test. A failure names the seed to set here."""

    def make(self, device: torch.device, dtype: torch.dtype) -> Adapters:
        """Return adapters with at least two slots."""
        raise NotImplementedError("return your adapters: MyAdapters(MyConfig(slots=2), device, dtype)")

    def save(self, folder: Path, matrices: Mapping[str, tuple[int, int]], seed: int) -> None:
        """Write an adapter that changes each of these matrices (checkpoint prefix -> (outputs, inputs)) by about the
        magnitude of the outputs. Equal seeds must change matrices of equal name and shape equally."""
        raise NotImplementedError("write an adapter in your format to the folder")

    # Slots

    def test_rows_without_an_adapter_stay_as_they_are(self) -> None:
        for dtype in self.dtypes:
            block = self._block(dtype)
            block.load(0, "a", seed=1)
            for name, layer in block.layers.items():
                x_TI = self._input(layer, 5, dtype)
                before = block.product(name, x_TI, None)
                after = block.product(name, x_TI, [-1, 0, -1, -1, 0])
                kept = [0, 2, 3]
                assert same_bits(after[kept], before[kept]), f"{name}: rows with slot -1 must not change"
                assert not torch.equal(after[[1, 4]], before[[1, 4]]), f"{name}: the adapter in slot 0 has no effect"

    def test_empty_slots_have_no_effect(self) -> None:
        block = self._block()
        for name, layer in block.layers.items():
            x_TI = self._input(layer, 3)
            plain = block.product(name, x_TI, None)
            assert_near(block.product(name, x_TI, [0, 1, 0]), plain, 1e-6, f"{name} with empty slots")

    def test_a_row_has_the_adapter_of_its_slot(self) -> None:
        """A row's result does not depend on the other rows and their adapters."""
        for dtype in self.dtypes:
            block = self._block(dtype)
            block.load(0, "a", seed=1)
            block.load(1, "b", seed=2)
            slots = [1, -1, 0, 0, 1, 1, -1, 0]
            for name, layer in block.layers.items():
                x_TI = self._input(layer, len(slots), dtype)
                together = block.product(name, x_TI, slots)
                for row, slot in enumerate(slots):
                    alone = block.product(name, x_TI[row : row + 1], [slot])
                    assert_near(together[row : row + 1], alone, 2 * TOLERANCE[dtype], f"{name}, row {row} in a batch")

    def test_all_slots_are_equivalent(self) -> None:
        block = self._block()
        block.load(0, "a", seed=1)
        x_TI = {name: self._input(layer, 4) for name, layer in block.layers.items()}
        first = {name: block.product(name, x_TI[name], [0] * 4) for name in x_TI}
        block.load(1, "b", seed=2)
        block.adapters.place(0, "b")
        block.adapters.place(1, "a")
        for name in x_TI:
            moved = block.product(name, x_TI[name], [1] * 4)
            assert_near(moved, first[name], 1e-6, f"{name} with the adapter in another slot")
            other = block.product(name, x_TI[name], [0] * 4)
            assert not torch.allclose(other, first[name], rtol=0.05), f"{name}: place did not replace slot 0's adapter"

    def test_a_slot_keeps_its_adapter_after_drop(self) -> None:
        block = self._block()
        block.load(0, "a", seed=1)
        x_TI = self._input(block.layers["o"], 4)
        before = block.product("o", x_TI, [0] * 4)
        block.adapters.drop("a")
        block.adapters.drop("a")
        block.adapters.drop("never read")
        assert same_bits(block.product("o", x_TI, [0] * 4), before), "drop must not change a slot"
        block.load(0, "again", seed=1)
        assert_near(block.product("o", x_TI, [0] * 4), before, 1e-6, "an adapter that was read again")

    def test_placing_an_adapter_again_does_nothing(self) -> None:
        block = self._block()
        block.load(0, "a", seed=1)
        block.adapters.drop("a")
        block.adapters.place(0, "a")

    def test_matrices_that_an_adapter_lacks_do_not_change(self) -> None:
        block = self._block()
        block.load(0, "a", seed=1, only=("layer.k", "layer.down"))
        for name, layer in block.layers.items():
            x_TI = self._input(layer, 2)
            change = (block.product(name, x_TI, [0, 0]) - block.product(name, x_TI, None)).abs().amax(0)
            sizes, at = layer.shape.parts, 0
            for prefix, size in zip(layer.shape.names, sizes, strict=True):
                changed = bool(change[at : at + size].max() > 1e-4)
                expected = prefix in ("layer.k", "layer.down")
                assert changed == expected, f"{prefix}: the adapter has this matrix: {expected}; changed: {changed}"
                at += size

    # Read

    def test_an_invalid_adapter_is_refused_without_side_effects(self) -> None:
        block = self._block()
        block.load(0, "a", seed=1)
        x_TI = self._input(block.layers["down"], 3)
        before = block.product("down", x_TI, [0] * 3)
        wrong: dict[str, Mapping[str, tuple[int, int]] | None] = {
            "an empty folder": None,
            "outputs of another model": {"layer.o": (HIDDEN + 16, HEADS * DIM)},
            "a layer that is not there": {"layer.elsewhere": (HIDDEN, HIDDEN)},
        }
        for what, matrices in wrong.items():
            with tempfile.TemporaryDirectory() as folder:
                if matrices is not None:
                    self.save(Path(folder), matrices, 3)
                with pytest.raises(RequestError) as refused:
                    block.adapters.read("wrong", Path(folder))
                assert str(refused.value), f"the error for {what} must have a message"
        with pytest.raises(RequestError):
            block.adapters.read("wrong", Path(os.sep, "no", "such", "folder"))
        assert same_bits(block.product("down", x_TI, [0] * 3), before), "a refused adapter changed another one"

    def test_reading_in_a_separate_thread(self) -> None:
        block = self._block()
        with tempfile.TemporaryDirectory() as folder:
            self.save(Path(folder), MATRICES, 1)
            thread = threading.Thread(target=block.adapters.read, args=("a", Path(folder)))
            thread.start()
            thread.join()
        # After read the files are no longer needed.
        with torch.inference_mode():
            block.adapters.place(0, "a")
        x_TI = self._input(block.layers["o"], 4)
        other = self._block()
        other.load(0, "a", seed=1)
        expected = other.product("o", x_TI, [0] * 4)
        assert_near(block.product("o", x_TI, [0] * 4), expected, 1e-6, "an adapter that was read in another thread")

    # Apply

    def test_apply_waits_for_nothing(self) -> None:
        block = self._block()
        block.load(0, "a", seed=1)
        for name, layer in block.layers.items():
            x_TI = self._input(layer, 4)
            with NoHostSync(f"apply of {name}"):
                block.product(name, x_TI, [0, -1, 0, 1])

    def test_no_token(self) -> None:
        block = self._block()
        for name, layer in block.layers.items():
            assert len(block.product(name, self._input(layer, 0), [])) == 0, f"{name}: no tokens must give no rows"

    def test_ranks_together_equal_one(self) -> None:
        """Outputs of a column-parallel layer are concatenated, those of a row-parallel one are summed."""
        whole, size = self._block(), 2
        ranks = [self._block(rank=rank, size=size) for rank in range(size)]
        for block in (whole, *ranks):
            block.load(0, "a", seed=1)
        slots = [0, -1, 0]
        for name, layer in whole.layers.items():
            x_TI = self._input(layer, 3)
            expected = whole.product(name, x_TI, slots)
            if isinstance(layer, RowParallel):
                shares = x_TI.chunk(size, dim=1)
                partials = [rank.product(name, share, slots) for rank, share in zip(ranks, shares, strict=True)]
                got = torch.stack(partials).sum(0)
                assert_near(got, expected, 1e-5, f"{name} over {size} ranks")
                continue
            parts = [rank.product(name, x_TI, slots).split(rank.layers[name].shape.parts, 1) for rank in ranks]
            joined = torch.cat([torch.cat(part, 1) for part in zip(*parts, strict=True)], 1)
            assert_near(joined, expected, 1e-5, f"{name} over {size} ranks")

    # Helpers

    def _input(self, layer: Linear, tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        fresh(self)
        return torch.randn(tokens, layer.shape.inp).to(self.device, dtype)

    def _block(self, dtype: torch.dtype = torch.float32, rank: int = 0, size: int = 1) -> _Block:
        fresh(self)
        return _Block(self, dtype, rank, size)


class _Block:
    """Layers of one block with weights and adapters."""

    def __init__(self, suite: AdaptersContract, dtype: torch.dtype, rank: int, size: int) -> None:
        self.suite, self.device = suite, torch.device(suite.device)
        self.adapters = suite.make(self.device, dtype)
        assert self.adapters.slots >= 2, f"make() must return adapters with at least 2 slots, got {self.adapters.slots}"
        collective: Collective = Alone(None)
        collective.rank, collective.size = rank, size
        build = build_context(SPEC, collective=collective, adapters=self.adapters, dtype=dtype, device=self.device)
        names = [f"layer.{part}" for part in "qkv"]
        self.layers: dict[str, Linear] = {
            "qkv": QKVParallel("layers.0.attn.qkv", tuple(names), build, HIDDEN, HEADS, KV_HEADS, DIM),
            "o": RowParallel("layers.0.attn.o", "layer.o", build, HEADS * DIM, HIDDEN),
            "gate_up": ColumnParallel("layers.0.mlp.gate_up", ("layer.gate", "layer.up"), build, HIDDEN, (FFN, FFN)),
            "down": RowParallel("layers.0.mlp.down", "layer.down", build, FFN, HIDDEN),
        }
        random = torch.Generator().manual_seed(0)
        weights = {name: torch.randn(shape, generator=random) / shape[1] ** 0.5 for name, shape in MATRICES.items()}
        for layer in self.layers.values():
            names = [part.name for part in layer.parts]
            load_weights(layer.weights(), ((f"{name}.weight", partial(Lazy, weights[name])) for name in names))
            layer.finish()
        self.adapters.allocate()

    def load(self, slot: int, key: str, seed: int, only: tuple[str, ...] = tuple(MATRICES)) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.suite.save(Path(folder), {name: MATRICES[name] for name in only}, seed)
            self.adapters.read(key, Path(folder))
        self.adapters.place(slot, key)

    @torch.inference_mode()
    def product(self, name: str, x_TI: torch.Tensor, slots: list[int] | None) -> torch.Tensor:
        """Return the layer's output; `slots` by token, None = a step without adapters."""
        x = Bundle((Activation(PLAIN, x_TI),))
        slots_T = None if slots is None else torch.tensor(slots, dtype=torch.int32, device=self.device)
        self.adapters.slots_T = slots_T
        try:
            y: torch.Tensor | Partial = self.layers[name](x)
        finally:
            self.adapters.slots_T = None
        return y.values if isinstance(y, Partial) else y
