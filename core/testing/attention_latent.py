"""Part of the contract suite for attention backends: compressed latents (write_mla, attend_mla).

Shapes: T tokens, H query heads, D query head dim (nope + R), L kv rank, R rotary dim, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.core.interfaces import (
    MLA,
    PLAIN,
    ActFormat,
    AttentionBackend,
    AttentionLayer,
    Bundle,
    KVGroup,
    LatentNorm,
    Plane,
    Rope,
    TreeMask,
)
from dovetail.core.ops.formats import encode_reference
from dovetail.core.ops.latents import latent_planes, read_latents
from dovetail.core.testing.attention_arena import MAX_LEN, Arena, Step, visible_keys
from dovetail.core.testing.formats import SCALED_ROWS
from dovetail.core.testing.numeric import TOLERANCE, assert_near, fresh, poisoned_memory, same_bits

EPS = 1e-5
ROUNDING = 0.04
"""Maximum error of 8-bit latents relative to their norm."""
Rows = Sequence[tuple[str, int]]
ROUNDS: dict[str, Sequence[tuple[Rows, int]]] = {
    "prompts": [([("a", 41), ("b", 5), ("c", 57), ("d", 1)], 0)],
    "chunks": [([("a", 7)], 0), ([("a", 45), ("b", 3)], 0), ([("b", 11), ("a", 64)], 0)],
    "decode": [([("a", 9), ("b", 50), ("c", 17)], 0), *[([("c", 1), ("a", 1), ("b", 1)], 3)] * 3],
    "mixed": [
        ([("a", 9), ("b", 6)], 0),
        ([("b", 1), ("a", 1), ("c", 48)], 2),
        ([("a", 1), ("b", 1), ("c", 43), ("d", 3), ("e", 44)], 2),
    ],
    "drafts": [([("a", 9), ("b", 6), ("c", 17)], 0), ([("c", 1), ("a", 5), ("b", 2), ("d", 8)], 3)],
}
"""Consecutive steps, as in attention.BATCHES, with rows long enough to be expanded."""


class LatentArena(Arena):
    """Arena whose pages hold latents. `truth` has [MAX_LEN, L + R] for each layer and sequence."""

    kind = "mla"

    def __init__(self, backend: AttentionBackend, *, mla: MLA, heads: int, **options: Any) -> None:
        self.mla = mla
        sizes = {"heads": (heads, heads), "head_dim": mla.nope_dim + mla.rope_dim}
        super().__init__(backend, **{**options, **sizes})
        self.up_HOL = self.random(heads, mla.nope_dim + mla.v_dim, mla.kv_rank)
        self.norm = LatentNorm(self.random(mla.kv_rank), EPS)
        self.rope = Rope(torch.randn(MAX_LEN, mla.rope_dim, device=self.device))

    @property
    def columns(self) -> int:
        return self.heads * self.mla.v_dim

    def page_planes(self) -> tuple[Plane, ...]:
        return latent_planes(self.mla, self.kv_dtype, self.dtype)

    def layer(self, group: KVGroup, local: int) -> AttentionLayer:
        return replace(super().layer(group, local), mla=self.mla)

    def inputs(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random q [T, H * D] and latents [T, L + R], which are columns of a larger matrix, as a merged matmul
        returns them."""
        tokens = len(step.paged.positions_T)
        q, columns = self.heads * self.head_dim, self.mla.kv_rank + self.mla.rope_dim
        q, latents = self.random(tokens, q + columns).split((q, columns), dim=1)
        return q, latents

    def write(
        self,
        layer: AttentionLayer,
        step: Step,
        qkv: torch.Tensor | None = None,
        inputs: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Write latents, check what the pages hold and the returned q_THD."""
        assert qkv is None, "latents have inputs in place of qkv"
        q, latents = inputs or self.inputs(step)
        before = q.clone(), latents.clone()
        with poisoned_memory():
            q_THD = self.backend.write_mla(layer, step.ctxs[layer.group], q, latents, self.rope, self.norm)
        assert same_bits(q, before[0]) and same_bits(latents, before[1]), "write_mla must not modify its inputs"
        rank, nope, positions = self.mla.kv_rank, self.mla.nope_dim, step.paged.positions_T
        own = slice(step.tokens)
        wide = latents.double()
        inverse = (wide[:, :rank].pow(2).mean(-1, keepdim=True) + self.norm.eps).rsqrt()
        normed = wide[:, :rank] * inverse * self.norm.weight_L.double()
        key_TR = _rotated(wide[:, None, rank:], self.rope, positions)[:, 0]
        given = q.view(len(q), self.heads, self.head_dim).double()
        expected_q = torch.cat((given[..., :nope], _rotated(given[..., nope:], self.rope, positions)), dim=-1)
        assert_near(q_THD[own], expected_q[own], self.tolerance, "q that write_mla returned")
        written = step.paged.metas[layer.group].write_T[own]
        stored = read_latents(layer, self.paging.pools[layer.group], written, torch.float64)
        narrow = TOLERANCE.get(self.kv_dtype, ROUNDING)
        assert_near(stored[0], normed[own], narrow, "normed latents in the pages")
        wide_enough = self.tolerance if self.kv_dtype.itemsize == 1 else narrow
        assert_near(stored[1], key_TR[own], wide_enough, "rotated columns in the pages")
        pages = torch.cat(stored, dim=1).cpu()
        for token, _, name, at in step.row_tokens():
            empty = torch.full((MAX_LEN, pages.shape[1]), torch.nan).double()
            self.truth.setdefault((layer.index, name), empty)[at] = pages[token]
        return q_THD

    def attend(
        self, layer: AttentionLayer, step: Step, q_THD: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)
    ) -> Bundle:
        with poisoned_memory():
            return self.backend.attend_mla(layer, step.ctxs[layer.group], q_THD, self.up_HOL, emit)

    def expected(self, layer: AttentionLayer, step: Step, q_THD: torch.Tensor) -> torch.Tensor:
        out = []
        nope, rank, token = self.mla.nope_dim, self.mla.kv_rank, 0
        up_HOL, queries_THD = self.up_HOL.cpu().double(), q_THD.cpu().double()
        for row, ((name, count), start) in enumerate(zip(step.rows, step.paged.starts, strict=True)):
            length = start + count
            seen = torch.zeros(count, length, dtype=torch.bool)
            for i in range(count):
                seen[i, visible_keys(layer, step, token + i, row, start + i)] = True
            latent_SL, key_SR = self.truth[layer.index, name][:length].split((rank, self.mla.rope_dim), dim=1)
            k_HSN, v_HSV = (latent_SL @ up_HOL.mT).split((nope, self.mla.v_dim), dim=2)
            q_HND = queries_THD[token : token + count].transpose(0, 1)
            scores_HNS = q_HND[..., :nope] @ k_HSN.mT + q_HND[..., nope:] @ key_SR.T
            weights_HNS = (scores_HNS * layer.scale).masked_fill(~seen, float("-inf")).softmax(-1)
            out.append((weights_HNS @ v_HSV).transpose(0, 1).flatten(1))
            token += count
        return torch.cat(out)


def _rotated(x_THR: torch.Tensor, rope: Rope, positions_T: torch.Tensor) -> torch.Tensor:
    """Rotate all columns, in float64: column i together with column i + R / 2."""
    cos_T1R, sin_T1R = rope.table[positions_T].double()[:, None].chunk(2, dim=-1)
    a, b = x_THR.double().chunk(2, dim=-1)
    return torch.cat((a * cos_T1R - b * sin_T1R, b * cos_T1R + a * sin_T1R), dim=-1)


class LatentTests:
    """Tests that AttentionContract inherits. It has the meaning and defaults of the settings."""

    device: str
    dtype: torch.dtype
    tree: bool
    mixed_graphs: bool
    poison: float
    mla: tuple[MLA, ...]
    mla_kv_dtypes: tuple[torch.dtype, ...]
    mla_heads: tuple[int, ...]

    def make(self) -> AttentionBackend:
        raise NotImplementedError

    def _settings(self) -> dict[str, Any]:
        raise NotImplementedError

    @pytest.mark.parametrize("rounds", ROUNDS.values(), ids=ROUNDS)
    def test_latents_equal_the_loop(self, rounds: Sequence[tuple[Rows, int]]) -> None:
        """Rows of few tokens and of many, with and without earlier keys."""
        for number, mla in enumerate(self._sizes()):
            arena = self._latents(mla, self.mla_heads[number % len(self.mla_heads)])
            for rows, num_decode in rounds:
                arena.run(arena.plan(rows, num_decode=num_decode, slack=5, padding=2))

    def test_latent_dtypes(self) -> None:
        self._sizes()
        if not self.mla_kv_dtypes:
            pytest.skip("mla_kv_dtypes = ()")
        for kv_dtype in self.mla_kv_dtypes:
            arena = self._latents(kv_dtype=kv_dtype)
            arena.run(arena.plan([("a", 41), ("b", 6)]))
            arena.run(arena.plan([("b", 1), ("a", 1), ("c", 37), ("d", 3)], num_decode=2))

    def test_padded_drafts_do_not_reach_valid_latents(self) -> None:
        arena = self._latents()
        arena.run(arena.plan([("a", 9), ("b", 6)]))
        valid = {"a": 4, "b": 1}
        step = arena.plan([(name, 4) for name in valid], num_decode=2, slack=6)
        counted = [0, 1, 2, 3, 4]
        for layer in arena.layers:
            q, latents = arena.inputs(step)
            q[5:] *= 1e3
            arena.check(layer, step, arena.write(layer, step, inputs=(q, latents)), counted)
        arena.paging.rewind("b", 3)
        arena.run(arena.plan([("b", 3), ("a", 1)], num_decode=2))

    def test_latents_of_long_rows(self) -> None:
        """Kernels split the keys of long rows over programs and merge the parts."""
        arena = self._latents(pages=400)
        prompt = arena.plan([("a", 600), ("b", 520)])
        for layer in arena.layers:
            arena.write(layer, prompt)
        arena.run(arena.plan([("a", 1), ("b", 3), ("c", 5)], num_decode=2, slack=4))
        arena.run(arena.plan([("b", 1), ("a", 37)], num_decode=1))

    def test_a_plan_of_capacity_serves_latents(self) -> None:
        """The host's numbers are capacities while a graph of mixed steps is captured."""
        self._sizes()
        if not self.mixed_graphs:
            pytest.skip("mixed_graphs = False")
        arena = self._latents()
        rounds: Sequence[tuple[Rows, int]] = (([("a", 9), ("b", 47)], 0), ([("b", 3), ("a", 1), ("c", 43)], 2))
        for rows, num_decode in rounds:
            arena.run(arena.plan(rows, num_decode=num_decode, slack=40, padding=5, spare=3))

    def test_a_tree_of_drafts_over_latents(self) -> None:
        self._sizes()
        if not self.tree:
            pytest.skip("tree = False")
        arena = self._latents()
        arena.run(arena.plan([("a", 9), ("b", 6)]))
        # The root has two children, and the second one a child.
        bits_T = torch.tensor([0b000, 0b001, 0b010, 0b110] * 2, device=self.device)
        root_T = torch.tensor([9] * 4 + [6] * 4, device=self.device)
        rows = [("a", 4), ("b", 4)]
        arena.run(arena.plan(rows, num_decode=2, slack=4, change={"tree": TreeMask(root_T, bits_T)}))

    def test_write_mla_touches_nothing_else(self) -> None:
        """write_mla changes no other token's slot, layer or group, and attend_mla no slot at all."""
        arena = self._latents(windows=(0, 0), poison=7.0)
        for layer in arena.layers:
            step = arena.plan([("a", 5), ("b", 36)], padding=2)
            before = arena.planes()
            q_THD = arena.write(layer, step)
            written = step.paged.metas[layer.group].write_T
            for (id, name), expected in before.items():
                plane = arena.paging.pools[id].planes[name]
                if id == layer.group:
                    slots, new = (x[layer.local].flatten(0, 1).view(torch.uint8) for x in (expected, plane))
                    slots[written] = new[written]
                assert same_bits(plane, expected), (
                    f"write_mla of layer {layer.index} changed slots of plane {name!r} of group {id} that write_T does "
                    "not name"
                )
            before = arena.planes()
            arena.attend(layer, step, q_THD)
            for (id, name), plane in arena.planes().items():
                assert same_bits(plane, before[id, name]), f"attend_mla changed plane {name!r} of group {id}"

    def test_attend_mla_emits_the_formats_asked_for(self) -> None:
        arena = self._latents()
        step, layer = arena.plan([("a", 41), ("b", 6)]), arena.layers[0]
        q_THD = arena.write(layer, step)
        expected = encode_reference(arena.expected(layer, step, q_THD).to(self.dtype), SCALED_ROWS)
        bundle = arena.attend(layer, step, q_THD, (PLAIN, SCALED_ROWS))
        plain, scaled = bundle[PLAIN], bundle[SCALED_ROWS]
        assert plain.scale is None and plain.values.dtype == self.dtype, f"plain output must be {self.dtype}"
        assert scaled.scale is not None and expected.scale is not None
        assert_near(scaled.scale, expected.scale, arena.tolerance, "scales of the output")

    def test_mla_is_refused_by_name(self) -> None:
        """Without MLA (capability `kinds`), attend_mla raises NotImplementedError that names the backend."""
        if self.mla:
            pytest.skip("mla has sizes")
        backend = self.make()
        nothing = torch.empty(0)
        with pytest.raises(NotImplementedError, match=type(backend).__name__):
            backend.attend_mla(None, None, nothing, nothing)

    def _sizes(self) -> tuple[MLA, ...]:
        if not self.mla:
            pytest.skip("mla = ()")
        return self.mla

    def _latents(self, mla: MLA | None = None, heads: int | None = None, **options: Any) -> LatentArena:
        sizes = self._sizes()
        fresh(self)
        settings = {**self._settings(), **options}
        return LatentArena(self.make(), mla=mla or sizes[0], heads=heads or self.mla_heads[0], **settings)
