"""Backends with one fault each; the suite must reject them.

Shapes: T tokens, L keys of a row, S token slots of a pool, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from dovetail.core.interfaces import (
    PLAIN,
    AttentionLayer,
    AttnCtx,
    BatchMeta,
    HostBounds,
    Rope,
)
from dovetail.core.ops import encode, rope_kv_write
from dovetail.core.testing.attention import AttentionContract
from dovetail.core.testing.suite import failures

from ..faults import each, rejects, suite, variant
from .sound import Sound

fault = partial(variant, Sound)


class PrefillSeesOnlyItsChunk(Sound):
    def seen(self, layer, at, key_L, meta, row, token):  # type: ignore[no-untyped-def]
        count = int(meta.row_start_B1[row + 1] - meta.row_start_B1[row])
        first = int(meta.kv_len_B[row]) - count if count > 1 else 0
        return super().seen(layer, at, key_L, meta, row, token) & (key_L >= first)


class DecodeRowsHaveOneToken(Sound):
    """Treats every token of a decode row as its last one."""

    def attend_token(self, layer, ctx, q_HD, token):  # type: ignore[no-untyped-def]
        row = int(ctx.meta.rows_T[token])
        last = int(ctx.meta.row_start_B1[row + 1]) - 1
        return super().attend_token(layer, ctx, q_HD, last if row < ctx.host.num_decode else token)


class ReadsPastTheLength(Sound):
    def length(self, ctx: AttnCtx, row: int) -> int:
        return ctx.host.bounds[row]

    def seen(self, layer, at, key_L, meta, row, token):  # type: ignore[no-untyped-def]
        last = int(meta.row_start_B1[row + 1]) - 1 == token
        return super().seen(layer, at, key_L, meta, row, token) | (last & (key_L > at))


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


class GathersBehindTheWindow(SumsWhatIsMasked):
    """Reads pages behind the window and masks them afterwards."""

    length = Sound.length

    def mix(self, layer, *tensors):  # type: ignore[no-untyped-def]
        base = SumsWhatIsMasked if layer.window else Sound
        return base.mix(self, layer, *tensors)


class CountsBitsFromTheRoot(Sound):
    """Takes the first bit for the root, which precedes the first draft."""

    def seen_in_tree(self, layer, key_L, meta, token):  # type: ignore[no-untyped-def]
        return super().seen_in_tree(layer, key_L + 1, meta, token)


class MasksPromptsBesideTrees(Sound):
    """Applies the tree mask to every row of a step that has one."""

    def may_feed_trees(self, ctx, row):  # type: ignore[no-untyped-def]
        return True


class WindowCountsKeysOfTheTree(Sound):
    """Counts siblings as positions."""

    def seen_in_tree(self, layer, key_L, meta, token):  # type: ignore[no-untyped-def]
        path_L = super().seen_in_tree(replace(layer, window=0), key_L, meta, token)
        at = int(key_L[path_L].max())
        return path_L & (key_L > at - layer.window) if layer.window else path_L


class MasksByPosition(Sound):
    """Uses a token's position as its place in the KV cache; the two differ for tree drafts."""

    def seen(self, layer, at, key_L, meta, row, token):  # type: ignore[no-untyped-def]
        return super().seen(layer, at, key_L, meta, row, token) & (key_L <= int(meta.positions_T[token]))


class HasOneScaleForAllHeads(Sound):
    def kv_scales(self, layer):  # type: ignore[no-untyped-def]
        return tuple(s.max() if isinstance(s, torch.Tensor) else s for s in super().kv_scales(layer))


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


class TakesTheLayersIndex(Sound):
    """Uses the layer's model index instead of its index in the group."""

    def attend_token(self, layer, *args):  # type: ignore[no-untyped-def]
        local = layer.index if layer.index < len(self.pools[layer.group].group.layers) else layer.local
        return super().attend_token(replace(layer, local=local), *args)


class ScalesKeysInPlace(Sound):
    def attend(self, layer, ctx, q, emit=(PLAIN,)):  # type: ignore[no-untyped-def]
        self.pools[layer.group].layer(layer.local, "k").mul_(layer.scale)
        return super().attend(replace(layer, scale=1.0), ctx, q, emit)


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


def writes(name: str, change: Callable[..., dict[str, Any]]) -> type[Sound]:
    """Backend that passes the arguments which `change` returns to the core's op instead of its own."""

    def write(self, layer, ctx, qkv, rope, qk_norm=None):  # type: ignore[no-untyped-def]
        given = dict(layer=layer, meta=ctx.meta, pool=self.pools[layer.group], qkv=qkv, rope=rope, qk_norm=qk_norm)
        return rope_kv_write(**given | change(**given))

    return fault(name, write=write)


def padding_to_its_row(meta: BatchMeta, **_: Any) -> dict[str, Any]:
    """Use rows_T and positions_T, which are undefined for padding."""
    page_T = meta.page_table_BP[meta.rows_T, meta.positions_T // meta.page_tokens].long()
    return dict(meta=replace(meta, write_T=page_T * meta.page_tokens + meta.positions_T % meta.page_tokens))


def every_layer(**given: Any) -> dict[str, Any]:
    for local in range(len(given["pool"].group.layers)):
        rope_kv_write(**{**given, "layer": replace(given["layer"], local=local)})
    return {}


def whole_head(rope: Rope | None, layer: AttentionLayer, **_: Any) -> dict[str, Any]:
    """Stretch a partial rotary table over all dimensions."""
    if rope is None or rope.table.shape[1] == layer.head_dim:
        return {}
    repeats = layer.head_dim // rope.table.shape[1]
    return dict(rope=Rope(torch.cat([half.repeat(1, repeats) for half in rope.table.chunk(2, -1)], -1)))


def keys_as_values(qkv: torch.Tensor, layer: AttentionLayer, **_: Any) -> dict[str, Any]:
    sizes = (layer.heads, layer.kv_heads, layer.kv_heads)
    q, k, v = qkv.unflatten(1, (-1, layer.head_dim)).split(sizes, dim=1)
    return dict(qkv=torch.cat((q, v, k), dim=1).flatten(1))


BROKEN: dict[str, list[type[Sound]]] = {
    "test_scores_may_be_capped": [
        fault("CapsNothing", mix=lambda self, layer, *rest: Sound.mix(self, replace(layer, soft_cap=0.0), *rest))
    ],
    "test_sinks_count_in_the_sum_alone": [
        fault("HasNoSinks", mix=lambda self, layer, *rest: Sound.mix(self, replace(layer, sinks=None), *rest)),
        fault(
            "HasOneSink",
            mix=lambda self, layer, *rest: Sound.mix(
                self, replace(layer, sinks=layer.sinks[:1].expand(layer.heads)), *rest
            ),
        ),
    ],
    "test_scale_is_the_layers_own": [
        fault(
            "HasItsOwnScale",
            mix=lambda self, layer, *rest: Sound.mix(self, replace(layer, scale=layer.head_dim**-0.5), *rest),
        )
    ],
    "test_equals_the_loop": [
        fault("SeesTheNextToken", seen=lambda self, layer, at, *rest: Sound.seen(self, layer, at + 1, *rest)),
        fault("DoesNotSeeItself", seen=lambda self, layer, at, *rest: Sound.seen(self, layer, max(at - 1, 0), *rest)),
        PrefillSeesOnlyItsChunk,
        SumsWhatIsMasked,
        fault(
            "ReadsTheFirstRowsPages",
            slots=lambda self, meta, row, key_L: Sound.slots(
                self, meta, 0 if len(key_L) <= int(meta.kv_len_B[0]) else row, key_L
            ),
        ),
        fault(
            "TakesPagesForConsecutive",
            slots=lambda self, meta, row, key_L: int(meta.page_table_BP[row, 0]) * meta.page_tokens + key_L,
        ),
        fault("InterleavesKVHeads", kv_head_H=lambda self, layer: torch.arange(layer.heads) % layer.kv_heads),
        fault(
            "TakesTheFirstLayer",
            attend_token=lambda self, layer, *rest: Sound.attend_token(self, replace(layer, local=0), *rest),
        ),
        LeavesOutARow,
        AnswersInFloat32,
    ],
    "test_padded_draft_positions_do_not_reach_valid_ones": [DecodeRowsHaveOneToken],
    "test_host_bounds_may_be_loose": [ReadsPastTheLength],
    "test_a_plan_of_capacity_serves_any_step": [FindsRowsByTheHostsCounts],
    "test_window_counts_the_token_itself": [
        fault("IgnoresTheWindow", seen=lambda self, layer, *rest: Sound.seen(self, replace(layer, window=0), *rest)),
        fault(
            "WindowWithoutTheTokenItself",
            seen=lambda self, layer, *rest: Sound.seen(
                self, replace(layer, window=layer.window and layer.window + 1), *rest
            ),
        ),
    ],
    "test_pages_behind_the_window_may_be_gone": [GathersBehindTheWindow],
    "test_tree_mask_selects_visible_drafts": [
        fault(
            "IgnoresTheTree",
            plan_device=lambda self, meta, *rest: Sound.plan_device(self, replace(meta, tree=None), *rest),
        ),
        CountsBitsFromTheRoot,
        MasksPromptsBesideTrees,
        MasksByPosition,
    ],
    "test_windows_count_positions_in_trees": [WindowCountsKeysOfTheTree],
    "test_scores_may_be_large": [
        fault(
            "DoesNotSubtractTheGreatestScore",
            softmax=lambda self, scores_HL: scores_HL.exp() / scores_HL.exp().sum(-1, keepdim=True),
        )
    ],
    "test_kv_dtypes": [
        fault("ForgetsTheScaleOfValues", kv_scales=lambda self, layer: (layer.k_scale, 1.0)),
        HasOneScaleForAllHeads,
    ],
    "test_groups_have_separate_contexts": [KeepsTheLastContext, RefinesTheSharedPlan, TakesTheLayersIndex],
    "test_contexts_of_several_steps_live_at_once": [KeepsAContextPerGroup],
    "test_metadata_is_read_only": [ClearsStaleEntries],
    "test_bind_takes_new_pools": [
        fault("BindsOnce", bind=lambda self, pools: setattr(self, "pools", self.pools or pools))
    ],
    "test_plans_on_the_host_without_pools": [fault("PlansFromPools", plan_host=lambda self, bounds: self.pools[0])],
    "test_attend_changes_no_page": [ScalesKeysInPlace],
    "test_write_touches_nothing_else": [
        writes(
            # Not one later: the last page's last slot has none after it.
            "WritesOneSlotEarlier",
            lambda meta, **_: dict(meta=replace(meta, write_T=(meta.write_T - 1).clamp(min=0))),
        ),
        writes("WritesPaddingToItsRow", padding_to_its_row),
        writes("WritesEveryLayer", every_layer),
    ],
    "test_write_norms_then_rotates": [
        writes("ForgetsToRotate", lambda **_: dict(rope=None)),
        writes(
            "RotatesByPlaceInTheStep",
            lambda meta, **_: dict(meta=replace(meta, positions_T=torch.arange(len(meta.positions_T)))),
        ),
        writes("RotatesTheWholeHead", whole_head),
        writes("ForgetsTheNorm", lambda **_: dict(qk_norm=None)),
        writes(
            "NormsKeysLikeQueries",
            lambda qk_norm, **_: dict(qk_norm=qk_norm and replace(qk_norm, k_weight_D=qk_norm.q_weight_D)),
        ),
        writes("SwapsKeysAndValues", keys_as_values),
    ],
    "test_emits_the_formats_asked_for": [
        fault("ForgetsWhatToEmit", attend=lambda self, layer, ctx, q, emit=None: Sound.attend(self, layer, ctx, q)),
        fault(
            "EmitsTheFirstAlone",
            attend=lambda self, layer, ctx, q, emit=(PLAIN,): Sound.attend(self, layer, ctx, q, emit[:1]),
        ),
    ],
    "test_mla_is_refused_by_name": [
        fault("HasAnMLAOfAKind", attend_mla=lambda self, *args, **options: encode(torch.empty(0)))
    ],
}


def suite_of(backend: type[Sound]) -> AttentionContract:
    return suite(
        AttentionContract,
        make=lambda self: backend(),
        dtype=torch.bfloat16 if backend is AnswersInFloat32 else torch.float32,
        heads=((6, 2),),
        kv_dtypes=(torch.float16, torch.float8_e4m3fn),
        mixed_graphs=True,
        scores=("soft_cap", "sinks"),
    )


@each(BROKEN)
def test_the_suite_rejects(broken: type[Sound], test: str) -> None:
    assert rejects(suite_of(broken), test)


def test_the_sound_one_passes() -> None:
    assert failures(suite_of(Sound)) == {}
