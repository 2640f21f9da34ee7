"""Backends with one fault each; the suite must reject them.

Shapes: T tokens, L keys of a row, S token slots of a pool, W tokens of a tree, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from dovetail.core.interfaces import (
    PLAIN,
    ActFormat,
    AttentionBackend,
    AttentionLayer,
    AttnCtx,
    BatchMeta,
    Bundle,
    HostBounds,
    KVPool,
    QKNorm,
    Rope,
)
from dovetail.core.ops import encode, rope_kv_write
from dovetail.core.testing.attention import AttentionContract
from dovetail.core.testing.suite import failures


class Sound(AttentionBackend):
    """Correct backend that works token by token, with one overridable method per possible fault."""

    def __init__(self) -> None:
        super().__init__(None)

    def attend(
        self, layer: AttentionLayer, ctx: AttnCtx, q: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)
    ) -> Bundle:
        out = torch.empty_like(q).zero_()
        for token in range(int(ctx.meta.row_start_B1[-1])):
            out[token] = self.attend_token(layer, ctx, q[token], token)
        return encode(out.flatten(1), emit)

    def attend_token(self, layer: AttentionLayer, ctx: AttnCtx, q_HD: torch.Tensor, token: int) -> torch.Tensor:
        row = int(ctx.meta.rows_T[token])
        key_L = torch.arange(self.length(ctx, row))
        at = int(ctx.meta.kv_len_B[row]) - int(ctx.meta.row_start_B1[row + 1]) + token
        seen_L = self.seen(layer, ctx.meta, row, key_L, at, token)
        slots_L = self.slots(ctx.meta, row, key_L)
        pool = self.pools[layer.group]
        k_LKD, v_LKD = (
            # 8-bit floats cannot be indexed.
            scaled(pool.layer(layer.local, name).flatten(0, 1).to(q_HD.dtype)[slots_L], pool.planes[name].dtype, scale)
            for name, scale in zip(("k", "v"), self.kv_scales(layer), strict=True)
        )
        return self.mix(layer, q_HD, k_LKD, v_LKD, seen_L)

    def kv_scales(self, layer: AttentionLayer) -> tuple[float | torch.Tensor, float | torch.Tensor]:
        return layer.k_scale, layer.v_scale

    def length(self, ctx: AttnCtx, row: int) -> int:
        return int(ctx.meta.kv_len_B[row])

    def slots(self, meta: BatchMeta, row: int, key_L: torch.Tensor) -> torch.Tensor:
        pages = meta.page_table_BP[row].long()
        return pages[key_L // meta.page_tokens] * meta.page_tokens + key_L % meta.page_tokens

    def seen(
        self, layer: AttentionLayer, meta: BatchMeta, row: int, key_L: torch.Tensor, at: int, token: int
    ) -> torch.Tensor:
        seen_L = key_L <= at
        if meta.tree_mask_TW is not None:
            back_L = key_L - (int(meta.kv_len_B[row]) - meta.tree_mask_TW.shape[1])
            seen_L = (back_L < 0) | meta.tree_mask_TW[token][back_L.clamp(min=0)]
        return seen_L & (key_L > at - layer.window) if layer.window else seen_L

    def mix(
        self,
        layer: AttentionLayer,
        q_HD: torch.Tensor,
        k_LKD: torch.Tensor,
        v_LKD: torch.Tensor,
        seen_L: torch.Tensor,
    ) -> torch.Tensor:
        head_H = self.kv_head_H(layer)
        k_LHD, v_LHD = k_LKD[seen_L][:, head_H].float(), v_LKD[seen_L][:, head_H].float()
        scores_HL = torch.einsum("hd,lhd->hl", q_HD.float(), k_LHD) * layer.scale
        return torch.einsum("hl,lhd->hd", self.softmax(scores_HL), v_LHD).to(q_HD.dtype)

    def kv_head_H(self, layer: AttentionLayer) -> torch.Tensor:
        return torch.arange(layer.heads) // (layer.heads // layer.kv_heads)

    def softmax(self, scores_HL: torch.Tensor) -> torch.Tensor:
        return scores_HL.softmax(-1)


def scaled(x_LKD: torch.Tensor, stored: torch.dtype, scale: float | torch.Tensor) -> torch.Tensor:
    if stored.itemsize > 1:
        return x_LKD
    return x_LKD * (scale[:, None] if isinstance(scale, torch.Tensor) else scale)


# Visible keys.


class HasItsOwnScale(Sound):
    def mix(self, layer: AttentionLayer, *tensors: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().mix(replace(layer, scale=layer.head_dim**-0.5), *tensors)


class SeesTheNextToken(Sound):
    def seen(self, layer, meta, row, key_L, at, token):  # type: ignore[no-untyped-def]
        return super().seen(layer, meta, row, key_L, at + 1, token)


class DoesNotSeeItself(Sound):
    def seen(self, layer, meta, row, key_L, at, token):  # type: ignore[no-untyped-def]
        return super().seen(layer, meta, row, key_L, max(at - 1, 0), token)


class PrefillSeesOnlyItsChunk(Sound):
    def seen(self, layer, meta, row, key_L, at, token):  # type: ignore[no-untyped-def]
        count = int(meta.row_start_B1[row + 1] - meta.row_start_B1[row])
        first = int(meta.kv_len_B[row]) - count if count > 1 else 0
        return super().seen(layer, meta, row, key_L, at, token) & (key_L >= first)


class DecodeRowsHaveOneToken(Sound):
    """Treats every token of a decode row as its last one."""

    def attend_token(self, layer, ctx, q_HD, token):  # type: ignore[no-untyped-def]
        row = int(ctx.meta.rows_T[token])
        last = int(ctx.meta.row_start_B1[row + 1]) - 1
        return super().attend_token(layer, ctx, q_HD, last if row < ctx.host.num_decode else token)


class ReadsPastTheLength(Sound):
    def length(self, ctx: AttnCtx, row: int) -> int:
        return ctx.host.bounds[row]

    def seen(self, layer, meta, row, key_L, at, token):  # type: ignore[no-untyped-def]
        last = int(meta.row_start_B1[row + 1]) - 1 == token
        return super().seen(layer, meta, row, key_L, at, token) | (last & (key_L > at))


class FindsRowsByTheHostsCounts(Sound):
    """Uses the host's counts, which are upper bounds during graph capture."""

    def attend_token(self, layer, ctx, q_HD, token):  # type: ignore[no-untyped-def]
        rows_T = ctx.meta.rows_T.clone()
        rows_T[token] = bisect_right(list(accumulate(ctx.host.counts)), token)
        return super().attend_token(layer, replace(ctx, meta=replace(ctx.meta, rows_T=rows_T)), q_HD, token)


class SumsWhatIsMasked(Sound):
    """Multiplies masked values by a weight of zero, although a stale page may hold NaN."""

    def length(self, ctx: AttnCtx, row: int) -> int:
        return -(-super().length(ctx, row) // ctx.meta.page_tokens) * ctx.meta.page_tokens

    def mix(self, layer, q_HD, k_LKD, v_LKD, seen_L):  # type: ignore[no-untyped-def]
        head_H = self.kv_head_H(layer)
        scores_HL = torch.einsum("hd,lhd->hl", q_HD.float(), k_LKD[:, head_H].float()) * layer.scale
        weights_HL = scores_HL.masked_fill(~seen_L, -torch.inf).softmax(-1)
        return torch.einsum("hl,lhd->hd", weights_HL, v_LKD[:, head_H].float()).to(q_HD.dtype)


class ReadsTheFirstRowsPages(Sound):
    def slots(self, meta: BatchMeta, row: int, key_L: torch.Tensor) -> torch.Tensor:
        return super().slots(meta, 0 if len(key_L) <= int(meta.kv_len_B[0]) else row, key_L)


class TakesPagesForConsecutive(Sound):
    def slots(self, meta: BatchMeta, row: int, key_L: torch.Tensor) -> torch.Tensor:
        return int(meta.page_table_BP[row, 0]) * meta.page_tokens + key_L


class IgnoresTheWindow(Sound):
    def seen(self, layer, *args):  # type: ignore[no-untyped-def]
        return super().seen(replace(layer, window=0), *args)


class WindowWithoutTheTokenItself(Sound):
    def seen(self, layer, *args):  # type: ignore[no-untyped-def]
        return super().seen(replace(layer, window=layer.window and layer.window + 1), *args)


class GathersBehindTheWindow(SumsWhatIsMasked):
    """Reads pages behind the window and masks them afterwards."""

    def length(self, ctx: AttnCtx, row: int) -> int:
        return Sound.length(self, ctx, row)

    def mix(self, layer, q_HD, k_LKD, v_LKD, seen_L):  # type: ignore[no-untyped-def]
        base = SumsWhatIsMasked if layer.window else Sound
        return base.mix(self, layer, q_HD, k_LKD, v_LKD, seen_L)


class IgnoresTheTree(Sound):
    def plan_device(self, meta: BatchMeta, host: HostBounds, state: Any) -> AttnCtx:
        return super().plan_device(replace(meta, tree_mask_TW=None), host, state)


class AlignsTheTreeToTheRowsStart(Sound):
    """Aligns the mask's first column with the row's first token of the step, regardless of the row's count."""

    def seen(self, layer, meta, row, key_L, at, token):  # type: ignore[no-untyped-def]
        if meta.tree_mask_TW is not None:
            count = int(meta.row_start_B1[row + 1] - meta.row_start_B1[row])
            meta = replace(meta, tree_mask_TW=meta.tree_mask_TW[:, :count])
        return super().seen(layer, meta, row, key_L, at, token)


class InterleavesKVHeads(Sound):
    def kv_head_H(self, layer: AttentionLayer) -> torch.Tensor:
        return torch.arange(layer.heads) % layer.kv_heads


class DoesNotSubtractTheGreatestScore(Sound):
    def softmax(self, scores_HL: torch.Tensor) -> torch.Tensor:
        weights = scores_HL.exp()
        return weights / weights.sum(-1, keepdim=True)


class MasksByPosition(Sound):
    """Uses a token's position as its place in the KV cache; the two differ for tree drafts."""

    def seen(self, layer, meta, row, key_L, at, token):  # type: ignore[no-untyped-def]
        return super().seen(layer, meta, row, key_L, at, token) & (key_L <= int(meta.positions_T[token]))


class ForgetsTheScaleOfValues(Sound):
    def kv_scales(self, layer: AttentionLayer) -> tuple[float | torch.Tensor, float | torch.Tensor]:
        return layer.k_scale, 1.0


class HasOneScaleForAllHeads(Sound):
    def kv_scales(self, layer: AttentionLayer) -> tuple[float | torch.Tensor, float | torch.Tensor]:
        both = super().kv_scales(layer)
        return tuple(s.max() if isinstance(s, torch.Tensor) else s for s in both)  # type: ignore[return-value]


# Contexts.


class KeepsTheLastContext(Sound):
    def plan_device(self, meta: BatchMeta, host: HostBounds, state: Any) -> AttnCtx:
        self.last = super().plan_device(meta, host, state)
        return self.last

    def attend(self, layer, ctx, q, emit=(PLAIN,)):  # type: ignore[no-untyped-def]
        return super().attend(layer, self.last, q, emit)


class KeepsAContextPerGroup(Sound):
    """Keeps one context per group, which is enough for one step but not for two."""

    def plan_device(self, meta: BatchMeta, host: HostBounds, state: Any) -> AttnCtx:
        ctx = super().plan_device(meta, host, state)
        self.last = {**getattr(self, "last", {}), meta.page_tokens: ctx}
        return ctx

    def attend(self, layer, ctx, q, emit=(PLAIN,)):  # type: ignore[no-untyped-def]
        return super().attend(layer, self.last[ctx.meta.page_tokens], q, emit)


class RefinesTheSharedPlan(Sound):
    """Stores one group's pages in the plan that all groups share."""

    def plan_host(self, bounds: HostBounds) -> dict[str, torch.Tensor]:
        return {}

    def plan_device(self, meta: BatchMeta, host: HostBounds, state: Any) -> AttnCtx:
        state["pages"] = meta.page_table_BP
        return super().plan_device(meta, host, state)

    def attend(self, layer, ctx, q, emit=(PLAIN,)):  # type: ignore[no-untyped-def]
        meta = replace(ctx.meta, page_table_BP=ctx.state["pages"])
        return super().attend(layer, AttnCtx(meta, ctx.host, None), q, emit)


class ClearsStaleEntries(Sound):
    """Writes to shared metadata."""

    def plan_device(self, meta: BatchMeta, host: HostBounds, state: Any) -> AttnCtx:
        for row, length in enumerate(meta.kv_len_B.tolist()):
            meta.page_table_BP[row, -(-length // meta.page_tokens) :] = 0
        return super().plan_device(meta, host, state)


class BindsOnce(Sound):
    def bind(self, pools: Mapping[int, KVPool]) -> None:
        self.pools = self.pools or pools


class PlansFromPools(Sound):
    def plan_host(self, bounds: HostBounds) -> Any:
        return self.pools[0]


# Pages.


class TakesTheFirstLayer(Sound):
    def attend_token(self, layer, *args):  # type: ignore[no-untyped-def]
        return super().attend_token(replace(layer, local=0), *args)


class TakesTheLayersIndex(Sound):
    """Uses the layer's model index instead of its index in the group."""

    def attend_token(self, layer, *args):  # type: ignore[no-untyped-def]
        local = layer.index if layer.index < len(self.pools[layer.group].group.layers) else layer.local
        return super().attend_token(replace(layer, local=local), *args)


class ScalesKeysInPlace(Sound):
    def attend(self, layer, ctx, q, emit=(PLAIN,)):  # type: ignore[no-untyped-def]
        self.pools[layer.group].layer(layer.local, "k").mul_(layer.scale)
        return super().attend(replace(layer, scale=1.0), ctx, q, emit)


class Writes(Sound):
    """Passes changed arguments to the core's op."""

    def change(self, given: dict[str, Any]) -> None: ...

    def write(
        self, layer: AttentionLayer, ctx: AttnCtx, qkv: torch.Tensor, rope: Rope | None, qk_norm: QKNorm | None = None
    ) -> torch.Tensor:
        given = dict(layer=layer, meta=ctx.meta, pool=self.pools[layer.group], qkv=qkv, rope=rope, qk_norm=qk_norm)
        self.change(given)
        return rope_kv_write(**given)


class WritesOneSlotLater(Writes):
    def change(self, given: dict[str, Any]) -> None:
        slots_T = given["meta"].write_T
        given["meta"] = replace(given["meta"], write_T=torch.where(slots_T > 0, slots_T + 1, 0))


class WritesPaddingToItsRow(Writes):
    """Uses rows_T and positions_T, which are undefined for padding."""

    def change(self, given: dict[str, Any]) -> None:
        meta = given["meta"]
        page_T = meta.page_table_BP[meta.rows_T, meta.positions_T // meta.page_tokens].long()
        slots_T = page_T * meta.page_tokens + meta.positions_T % meta.page_tokens
        given["meta"] = replace(meta, write_T=slots_T)


class WritesEveryLayer(Writes):
    def change(self, given: dict[str, Any]) -> None:
        for local in range(len(given["pool"].group.layers)):
            rope_kv_write(**{**given, "layer": replace(given["layer"], local=local)})


class ForgetsToRotate(Writes):
    def change(self, given: dict[str, Any]) -> None:
        given["rope"] = None


class RotatesByPlaceInTheStep(Writes):
    def change(self, given: dict[str, Any]) -> None:
        meta = given["meta"]
        given["meta"] = replace(meta, positions_T=torch.arange(len(meta.positions_T)))


class RotatesTheWholeHead(Writes):
    """Stretches a partial rotary table over all dimensions."""

    def change(self, given: dict[str, Any]) -> None:
        rope, dim = given["rope"], given["layer"].head_dim
        if rope is not None and rope.table.shape[1] < dim:
            table = torch.cat([half.repeat(1, dim // rope.table.shape[1]) for half in rope.table.chunk(2, -1)], -1)
            given["rope"] = Rope(table)


class ForgetsTheNorm(Writes):
    def change(self, given: dict[str, Any]) -> None:
        given["qk_norm"] = None


class NormsKeysLikeQueries(Writes):
    def change(self, given: dict[str, Any]) -> None:
        norm = given["qk_norm"]
        given["qk_norm"] = norm and replace(norm, k_weight_D=norm.q_weight_D)


class SwapsKeysAndValues(Writes):
    def change(self, given: dict[str, Any]) -> None:
        layer, qkv = given["layer"], given["qkv"].unflatten(1, (-1, given["layer"].head_dim))
        q, k, v = qkv.split((layer.heads, layer.kv_heads, layer.kv_heads), dim=1)
        given["qkv"] = torch.cat((q, v, k), dim=1).flatten(1)


# Output.


class ForgetsWhatToEmit(Sound):
    def attend(self, layer, ctx, q, emit=(PLAIN,)):  # type: ignore[no-untyped-def]
        return super().attend(layer, ctx, q)


class EmitsTheFirstAlone(Sound):
    def attend(self, layer, ctx, q, emit=(PLAIN,)):  # type: ignore[no-untyped-def]
        return super().attend(layer, ctx, q, emit[:1])


class LeavesOutARow(Sound):
    """Leaves the row's output uninitialized."""

    def attend(self, layer, ctx, q, emit=(PLAIN,)):  # type: ignore[no-untyped-def]
        whole = super().attend(layer, ctx, q)[PLAIN].values
        out = torch.empty_like(whole)
        last = int(ctx.meta.row_start_B1[-2]) if len(ctx.host.counts) > 3 else len(q)
        out[:last] = whole[:last]
        return encode(out, emit)


class AnswersInFloat32(Sound):
    def attend(self, layer, ctx, q, emit=(PLAIN,)):  # type: ignore[no-untyped-def]
        return encode(super().attend(layer, ctx, q)[PLAIN].values.float(), emit)


class HasAnMLAOfAKind(Sound):
    def attend_mla(self, *args: Any, **kwargs: Any) -> Bundle:
        return encode(torch.empty(0))


BROKEN: dict[type[Sound], str] = {
    HasItsOwnScale: "test_scale_is_the_layers_own",
    SeesTheNextToken: "test_equals_the_loop",
    DoesNotSeeItself: "test_equals_the_loop",
    PrefillSeesOnlyItsChunk: "test_equals_the_loop",
    DecodeRowsHaveOneToken: "test_padded_draft_positions_do_not_reach_valid_ones",
    ReadsPastTheLength: "test_host_bounds_may_be_loose",
    FindsRowsByTheHostsCounts: "test_a_plan_of_capacity_serves_any_step",
    SumsWhatIsMasked: "test_equals_the_loop",
    ReadsTheFirstRowsPages: "test_equals_the_loop",
    TakesPagesForConsecutive: "test_equals_the_loop",
    IgnoresTheWindow: "test_window_counts_the_token_itself",
    WindowWithoutTheTokenItself: "test_window_counts_the_token_itself",
    GathersBehindTheWindow: "test_pages_behind_the_window_may_be_gone",
    IgnoresTheTree: "test_tree_mask_selects_visible_drafts",
    AlignsTheTreeToTheRowsStart: "test_tree_mask_selects_visible_drafts",
    MasksByPosition: "test_tree_mask_selects_visible_drafts",
    InterleavesKVHeads: "test_equals_the_loop",
    DoesNotSubtractTheGreatestScore: "test_scores_may_be_large",
    ForgetsTheScaleOfValues: "test_kv_dtypes",
    HasOneScaleForAllHeads: "test_kv_dtypes",
    KeepsTheLastContext: "test_groups_have_separate_contexts",
    KeepsAContextPerGroup: "test_contexts_of_several_steps_live_at_once",
    RefinesTheSharedPlan: "test_groups_have_separate_contexts",
    ClearsStaleEntries: "test_metadata_is_read_only",
    BindsOnce: "test_bind_takes_new_pools",
    PlansFromPools: "test_plans_on_the_host_without_pools",
    TakesTheFirstLayer: "test_equals_the_loop",
    TakesTheLayersIndex: "test_groups_have_separate_contexts",
    ScalesKeysInPlace: "test_attend_changes_no_page",
    WritesOneSlotLater: "test_write_touches_nothing_else",
    WritesPaddingToItsRow: "test_write_touches_nothing_else",
    WritesEveryLayer: "test_write_touches_nothing_else",
    ForgetsToRotate: "test_write_norms_then_rotates",
    RotatesByPlaceInTheStep: "test_write_norms_then_rotates",
    RotatesTheWholeHead: "test_write_norms_then_rotates",
    ForgetsTheNorm: "test_write_norms_then_rotates",
    NormsKeysLikeQueries: "test_write_norms_then_rotates",
    SwapsKeysAndValues: "test_write_norms_then_rotates",
    ForgetsWhatToEmit: "test_emits_the_formats_asked_for",
    EmitsTheFirstAlone: "test_emits_the_formats_asked_for",
    LeavesOutARow: "test_equals_the_loop",
    AnswersInFloat32: "test_equals_the_loop",
    HasAnMLAOfAKind: "test_mla_is_refused_by_name",
}


def suite_of(backend: type[Sound]) -> AttentionContract:
    class Suite(AttentionContract):
        dtype = torch.bfloat16 if backend is AnswersInFloat32 else torch.float32
        heads = ((6, 2),)
        kv_dtypes = (torch.float16, torch.float8_e4m3fn)
        mixed_graphs = True

        def make(self) -> AttentionBackend:
            return backend()

    return Suite()


@pytest.mark.parametrize(("broken", "test"), BROKEN.items(), ids=[broken.__name__ for broken in BROKEN])
def test_the_suite_rejects(broken: type[Sound], test: str) -> None:
    suite = suite_of(broken)
    assert test in failures(suite, skip=tuple(name for name in dir(suite) if name != test)), broken.__doc__


def test_the_sound_one_passes() -> None:
    assert failures(suite_of(Sound)) == {}
