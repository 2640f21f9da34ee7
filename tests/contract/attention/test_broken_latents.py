"""Backends for compressed latents with one fault each; the suite must reject them.

Shapes: T tokens, S keys of a row, H query heads, L kv rank, O nope + v rows of a head's up-projection.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dovetail.core.interfaces import MLA, PLAIN, AttentionBackend, BatchMeta
from dovetail.core.ops import encode
from dovetail.core.ops.latent_write import latent_write
from dovetail.core.ops.latents import LATENT, expands, read_latents
from dovetail.core.testing.attention import AttentionContract
from dovetail.core.testing.attention_latent import LatentTests
from dovetail.core.testing.suite import failures

from ..faults import each, rejects, suite, variant


class Sound(AttentionBackend):
    """Correct backend that works row by row, with one overridable method per possible fault."""

    def __init__(self) -> None:
        super().__init__(None)

    def attend(self, layer, ctx, q, emit=(PLAIN,)):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def attend_mla(self, layer, ctx, q, up_HOL, emit=(PLAIN,)):  # type: ignore[no-untyped-def]
        out_THV = q.new_zeros(len(q), layer.heads, layer.mla.v_dim)
        meta = ctx.meta
        starts = meta.row_start_B1.tolist()
        for row, first in enumerate(starts[:-1]):
            length, count = self.length(ctx, row), self.count(ctx, row)
            if not count:
                continue
            key_S = torch.arange(length)
            slots_S = meta.page_table_BP[row].long()[key_S // meta.page_tokens] * meta.page_tokens
            seen_NS = self.seen(layer, meta, row, count, key_S)
            latents = self.read(layer, slots_S + key_S % meta.page_tokens)
            mixed = self.mix(layer, q[first : first + count], *latents, up_HOL, seen_NS)
            out_THV[first : first + count] = mixed
        return self.emitted(out_THV.flatten(1), emit)

    def length(self, ctx, row):  # type: ignore[no-untyped-def]
        return int(ctx.meta.kv_len_B[row])

    def count(self, ctx, row):  # type: ignore[no-untyped-def]
        return int(ctx.meta.row_start_B1[row + 1] - ctx.meta.row_start_B1[row])

    def read(self, layer, slots_S):  # type: ignore[no-untyped-def]
        return read_latents(layer, self.pools[layer.group], slots_S, torch.float32)

    def seen(self, layer, meta: BatchMeta, row, count, key_S):  # type: ignore[no-untyped-def]
        length = len(key_S)
        seen_NS = key_S <= torch.arange(length - count, length)[:, None]
        if meta.tree is not None:
            first = int(meta.row_start_B1[row])
            root_N, bits_N = (x[first : first + count, None] for x in (meta.tree.root_T, meta.tree.ancestors_T))
            draft_NS = key_S - root_N - 1
            seen_NS = (draft_NS < 0) | (bits_N >> draft_NS.clamp(0, 63) & 1 != 0)
        return seen_NS

    def mix(self, layer, q_NHD, latent_SL, rotary_SR, up_HOL, seen_NS):  # type: ignore[no-untyped-def]
        nope = layer.mla.nope_dim
        up_HOL = up_HOL.float()
        inner_NHL = torch.einsum("nhd,hdl->nhl", q_NHD[..., :nope].float(), up_HOL[:, :nope])
        scores_HNS = torch.einsum("nhl,sl->hns", inner_NHL, latent_SL)
        scores_HNS = scores_HNS + torch.einsum("nhr,sr->hns", q_NHD[..., nope:].float(), rotary_SR)
        weights_HNS = (scores_HNS * layer.scale).masked_fill(~seen_NS, float("-inf")).softmax(-1)
        return torch.einsum("hns,sl,hvl->nhv", weights_HNS, latent_SL, up_HOL[:, nope:]).to(q_NHD.dtype)

    def emitted(self, out, emit):  # type: ignore[no-untyped-def]
        return encode(out, emit)


fault = partial(variant, Sound)


class LongRowsSeeOnlyThemselves(Sound):
    """Expands a chunk without the keys before it."""

    def seen(self, layer, meta, row, count, key_S):  # type: ignore[no-untyped-def]
        seen_NS = super().seen(layer, meta, row, count, key_S)
        return seen_NS & (key_S >= len(key_S) - count) if expands(layer.mla, count) else seen_NS


class LongRowsSeeLaterTokens(Sound):
    def seen(self, layer, meta, row, count, key_S):  # type: ignore[no-untyped-def]
        seen_NS = super().seen(layer, meta, row, count, key_S)
        return torch.ones_like(seen_NS) if expands(layer.mla, count) else seen_NS


class NormsTheInput(Sound):
    def write_mla(self, layer, ctx, q, latents, rope, norm):  # type: ignore[no-untyped-def]
        given = latents.clone()
        latents[:, : layer.mla.kv_rank] = 0
        return latent_write(layer, ctx.meta, self.pools[layer.group], q, given, rope, norm)


class WritesEveryLayer(Sound):
    def write_mla(self, layer, ctx, q, latents, rope, norm):  # type: ignore[no-untyped-def]
        pool = self.pools[layer.group]
        for local in range(len(pool.group.layers)):
            q_THD = latent_write(replace(layer, local=local), ctx.meta, pool, q, latents, rope, norm)
        return q_THD


class KeepsNoScales(Sound):
    def read(self, layer, slots_S):  # type: ignore[no-untyped-def]
        pool = self.pools[layer.group]
        if len(pool.planes) == 1:
            return super().read(layer, slots_S)
        latent_SL, rotary_SR = super().read(layer, slots_S)
        return pool.layer(layer.local, LATENT).flatten(0, 1).float()[slots_S], rotary_SR


def writes(name: str, **changed: Any) -> type[Sound]:
    def write_mla(self, layer, ctx, q, latents, rope, norm):  # type: ignore[no-untyped-def]
        inputs = {"meta": ctx.meta, "q": q, "latents": latents, "rope": rope, "norm": norm}
        inputs |= {key: change(inputs[key]) for key, change in changed.items()}
        return latent_write(layer, pool=self.pools[layer.group], **inputs)

    return fault(name, write_mla=write_mla)


def mixes(name: str, change: Any) -> type[Sound]:
    return fault(name, mix=lambda self, *args: Sound.mix(self, *change(*args)))


BROKEN: dict[str, list[type]] = {
    "test_latents_equal_the_loop": [
        LongRowsSeeOnlyThemselves,
        LongRowsSeeLaterTokens,
        NormsTheInput,
        mixes("HasAScaleOfItsOwn", lambda layer, *rest: (replace(layer, scale=layer.head_dim**-0.5), *rest)),
        mixes("ForgetsRotatedColumns", lambda layer, q, latent, rotary, *rest: (layer, q, latent, 0 * rotary, *rest)),
        mixes("ProjectsByOneHead", lambda layer, q, x, r, up, seen: (layer, q, x, r, up[:1].expand_as(up), seen)),
        writes("ForgetsTheNorm", norm=lambda norm: replace(norm, weight_L=torch.ones_like(norm.weight_L))),
        writes("ForgetsToRotate", rope=lambda rope: None),
        writes("RotatesByCacheIndex", meta=lambda meta: replace(meta, positions_T=meta.positions_T + 1)),
        fault("TakesLengthsFromTheHost", length=lambda self, ctx, row: ctx.host.bounds[row]),
    ],
    "test_latent_dtypes": [KeepsNoScales],
    "test_latents_of_long_rows": [
        mixes(
            "ForgetsKeysPastTheFirstRange",
            lambda layer, q, x, r, up, seen: (layer, q, x[:512], r[:512], up, seen[:, :512]),
        )
    ],
    "test_a_plan_of_capacity_serves_latents": [
        fault("CountsTokensOnTheHost", count=lambda self, ctx, row: min(ctx.host.counts[row], 4))
    ],
    "test_a_tree_of_drafts_over_latents": [
        fault(
            "DraftsAreAChain",
            seen=lambda self, layer, meta, *rest: Sound.seen(self, layer, replace(meta, tree=None), *rest),
        )
    ],
    "test_padded_drafts_do_not_reach_valid_latents": [
        fault(
            "SeesTheRowsLastToken",
            seen=lambda self, layer, meta, row, count, key_S: (
                Sound.seen(self, layer, meta, row, count, key_S) | (key_S == len(key_S) - 1)
            ),
        )
    ],
    "test_write_mla_touches_nothing_else": [WritesEveryLayer],
    "test_attend_mla_emits_the_formats_asked_for": [
        fault("EmitsTheFirstAlone", emitted=lambda self, out, emit: encode(out, emit[:1]))
    ],
}


def suite_of(backend: type[Sound]) -> AttentionContract:
    return suite(
        AttentionContract,
        make=lambda self: backend(),
        mla=(MLA(0, 16, 8, 8, 8),),
        mla_heads=(3,),
        mla_kv_dtypes=(torch.float8_e4m3fn,),
        mixed_graphs=True,
    )


@each(BROKEN)
def test_the_suite_rejects(broken: type[Sound], test: str) -> None:
    assert rejects(suite_of(broken), test)


def test_the_sound_one_passes() -> None:
    others = tuple(name for name in dir(AttentionContract) if name.startswith("test_") and name not in dir(LatentTests))
    assert failures(suite_of(Sound), skip=others) == {}
