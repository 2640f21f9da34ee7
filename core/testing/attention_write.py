"""Part of the contract suite for attention backends: what is written to the pages, and what stays unchanged.

Shapes: T tokens, H heads, D head dim.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dovetail.core.interfaces import PLAIN, QKNorm, Rope
from dovetail.core.testing.attention_arena import MAX_LEN, Arena
from dovetail.core.testing.numeric import assert_near, poisoned_memory, same_bits, seed_note


@dataclass(frozen=True)
class WriteCase:
    """How `write` transforms q and k."""

    rotary_dim: int | None
    """Divisor of the head dim that gives the rotated part; None = no rotation."""
    norm: bool

    def build(self, arena: Arena) -> tuple[QKNorm | None, Rope | None]:
        dim = arena.head_dim // self.rotary_dim if self.rotary_dim else 0
        norm = QKNorm(arena.random(arena.head_dim), arena.random(arena.head_dim), 1e-5) if self.norm else None
        return norm, Rope(torch.randn(MAX_LEN, dim, device=arena.device)) if dim else None


WRITES = {
    "plain": WriteCase(None, False),
    "rope": WriteCase(1, False),
    "partial_rope": WriteCase(2, False),
    "norm": WriteCase(None, True),
    "norm_and_rope": WriteCase(1, True),
}


class WriteTests:
    """Tests that AttentionContract inherits. It has the meaning and defaults of the settings."""

    dtype: torch.dtype
    heads: tuple[tuple[int, int], ...]

    def _arena(self, **options: Any) -> Arena:
        raise NotImplementedError

    def _windows(self, *windows: int) -> tuple[int, ...]:
        raise NotImplementedError

    @pytest.mark.parametrize("case", WRITES.values(), ids=WRITES)
    def test_write_norms_then_rotates(self, case: WriteCase) -> None:
        """write returns q and stores k and v in the pages. v is neither normed nor rotated."""
        for heads in self.heads:
            arena = self._arena(heads=heads)
            arena.run(arena.plan([("a", 9), ("b", 6)]))
            step, layer = arena.plan([("b", 2), ("a", 1), ("c", 7)], num_decode=2), arena.layers[-1]
            qkv = arena.random_qkv(step)
            q, k, v = qkv.view(len(qkv), -1, arena.head_dim).split((heads[0], heads[1], heads[1]), dim=1)
            norm, rope = case.build(arena)
            expected_q, expected_k = (
                rotated(normed(x, norm, weight), rope, step.paged.positions_T)
                for x, weight in ((q, "q_weight_D"), (k, "k_weight_D"))
            )
            with poisoned_memory():
                got_q = arena.backend.write(layer, step.ctxs[layer.group], qkv.clone(), rope, norm)
            written = step.paged.metas[layer.group].write_T
            stored = arena.paging.pools[layer.group]
            got_k, got_v = (stored.layer(layer.local, name).flatten(0, 1)[written] for name in ("k", "v"))
            assert got_q.dtype == self.dtype, f"q must have the model's dtype {self.dtype}, not {got_q.dtype}"
            assert_near(got_q, expected_q, arena.tolerance, "q that `write` returned")
            assert_near(got_k, expected_k, arena.tolerance, "k in the pages")
            assert same_bits(got_v, v.to(arena.kv_dtype)), "`write` must store v unchanged"

    @pytest.mark.parametrize("case", WRITES.values(), ids=WRITES)
    def test_write_and_attend_equals_both_calls(self, case: WriteCase) -> None:
        """write_and_attend equals write, then attend: for decode rows with and without drafts, and with chunks."""
        for heads, rows in zip(self.heads, itertools.cycle(([3, 1, 2], [1, 1, 1], [1, 1, 7])), strict=False):
            arena = self._arena(heads=heads)
            arena.run(arena.plan([("a", 9), ("b", 6)]))
            counts = list(zip("bac", rows, strict=True))
            step, layer = arena.plan(counts, num_decode=3 if max(rows) < 7 else 2), arena.layers[-1]
            qkv, ctx = arena.random_qkv(step), step.ctxs[layer.group]
            norm, rope = case.build(arena)
            written = step.paged.metas[layer.group].write_T
            pool = arena.paging.pools[layer.group]
            pages = [pool.layer(layer.local, name).flatten(0, 1) for name in ("k", "v")]
            q_THD = arena.backend.write(layer, ctx, qkv.clone(), rope, norm)
            expected = arena.backend.attend(layer, ctx, q_THD)[PLAIN].values
            stored = [page[written].clone() for page in pages]
            for page in pages:
                page[written] = 7.0
            with poisoned_memory():
                got = arena.backend.write_and_attend(layer, ctx, qkv.clone(), rope, norm)[PLAIN].values
            assert_near(got, expected, arena.tolerance, "the output of write_and_attend")
            for page, before, name in zip(pages, stored, "kv", strict=True):
                assert_near(page[written], before, arena.tolerance, f"{name} that write_and_attend stored")

    def test_write_touches_nothing_else(self) -> None:
        """write changes no other token's slot, layer or group; padding goes to scratch page 0."""
        arena = self._arena(windows=self._windows(0, 6), poison=7.0)
        for padding in (0, 3):
            for layer in arena.layers:
                step = arena.plan([("a", 5), ("b", 6)], padding=padding)
                before = arena.planes()
                arena.write(layer, step)
                written = step.paged.metas[layer.group].write_T
                for (id, name), expected in before.items():
                    plane = arena.paging.pools[id].planes[name]
                    if id == layer.group:
                        slots = expected[layer.local].flatten(0, 1)
                        unwritten = same_bits(plane[layer.local].flatten(0, 1)[written], slots[written])
                        assert not unwritten, f"`write` left the slots of write_T in plane {name!r} unchanged"
                        slots[written] = plane[layer.local].flatten(0, 1)[written]
                    assert same_bits(plane, expected), (
                        f"`write` of layer {layer.index} changed slots of plane {name!r} of group {id} that write_T "
                        f"does not name ({seed_note()})"
                    )

    def test_attend_changes_no_page(self) -> None:
        arena = self._arena(windows=self._windows(0, 6))
        step = arena.plan([("a", 9), ("b", 6)])
        asked = [(layer, arena.write(layer, step)) for layer in arena.layers]
        before = arena.planes()
        for layer, q_THD in asked:
            arena.attend(layer, step, q_THD)
        for (id, name), plane in arena.planes().items():
            assert same_bits(plane, before[id, name]), f"attend changed plane {name!r} of group {id}; it must only read"


def normed(x_THD: torch.Tensor, norm: QKNorm | None, weight: str) -> torch.Tensor:
    x = x_THD.double()
    if norm is None:
        return x
    weight_D: torch.Tensor = getattr(norm, weight)
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * weight_D.double()


def rotated(x_THD: torch.Tensor, rope: Rope | None, positions_T: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + half) of the first dimensions; the others stay."""
    if rope is None:
        return x_THD
    half = rope.table.shape[1] // 2
    out = x_THD.clone()
    for token, position in enumerate(positions_T.tolist()):
        for i in range(half):
            cos, sin = rope.table[position, i].double(), rope.table[position, half + i].double()
            a, b = x_THD[token, :, i], x_THD[token, :, half + i]
            out[token, :, i], out[token, :, half + i] = a * cos - b * sin, b * cos + a * sin
    return out
