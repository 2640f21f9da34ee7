"""Attention by FlashInfer (Ye et al. 2025). Our pages have its layout [page, token, kv head, dim].

FlashInfer plans the distribution of a step over the GPU on the host, from exact lengths, and `run` then launches. One
plan serves every layer of the same shape; planning inside a CUDA graph is not possible. Decode rows of one token use
its decode kernel, which splits long rows. All other rows, including those with drafts, use its prefill kernel.

Shapes: T tokens, B rows, P pages of a table, N pages of all rows, H query heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import (
    PLAIN,
    ActFormat,
    AttentionBackend,
    AttentionLayer,
    AttnCtx,
    BatchMeta,
    Bundle,
    HostBounds,
)
from dovetail.core.ops.formats import encode
from dovetail.core.ops.kv_write import FLOAT8
from dovetail.plugins.attention.config import FlashInferConfig

DTYPES = (torch.bfloat16, torch.float16)
TILE = 128
"""Number of query rows in FlashInfer's largest tile."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Consecutive rows of a step for one kernel and one KV group. int32 tensors, all on the host except pages_N."""

    tokens: slice
    """Range of the step's tokens."""
    decode: bool
    """Whether each row has one token."""
    longest: int
    """Largest number of tokens of a row."""
    query_start_B1: torch.Tensor
    page_start_B1: torch.Tensor
    last_page_B: torch.Tensor
    """Number of tokens in each row's last page."""
    kv_len_B: torch.Tensor
    pages_N: torch.Tensor


@dataclass(slots=True)
class PlannedWrapper:
    """A FlashInfer wrapper and the rows for which it was last planned."""

    wrapper: Any
    rows: RowSpan | None = None
    sent: torch.cuda.Event | None = None
    """Recorded after the copies that the plan started."""


class FlashInfer(AttentionBackend):
    config: FlashInferConfig
    exact_lengths = "host"

    def __init__(self, config: FlashInferConfig) -> None:
        super().__init__(config)
        self._planned: dict[tuple[object, ...], PlannedWrapper] = {}
        self._workspace: torch.Tensor | None = None

    def plan_device(self, meta: BatchMeta, host: HostBounds, state: object) -> AttnCtx:
        # A wrapper's plan also depends on heads and window, so the first layer of each shape makes it.
        single = host.num_decode if all(count == 1 for count in host.counts[: host.num_decode]) else 0
        spans = ((0, single), (single, len(host.counts)))
        return AttnCtx(meta, host, tuple(_rows(meta, host, a, b, a < single) for a, b in spans if a < b))

    def attend(
        self, layer: AttentionLayer, ctx: AttnCtx, q: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)
    ) -> Bundle:
        k, v = (self.pools[layer.group].layer(layer.local, name) for name in ("k", "v"))
        _check_dtypes(q.dtype, k.dtype)
        k_scale, v_scale = (layer.k_scale, layer.v_scale) if k.dtype in FLOAT8 else (None, None)
        if isinstance(k_scale, torch.Tensor):
            # FlashInfer takes a single scale. Scales per head are applied to the queries and to the output instead.
            q, k_scale = (q * _per_query_head(k_scale, layer)).to(q.dtype), None
        tokens = sum(ctx.host.counts)
        # Tokens past the last row are padding.
        out_THD = torch.empty_like(q) if tokens == len(q) else torch.zeros_like(q)
        scales = dict(k_scale=k_scale, v_scale=None if isinstance(v_scale, torch.Tensor) else v_scale)
        for rows in ctx.state:
            wrapper = self._plan(layer, rows, q, k)
            wrapper.run(q[rows.tokens].contiguous(), (k, v), out=out_THD[rows.tokens], **scales)
        if isinstance(v_scale, torch.Tensor):
            out_THD *= _per_query_head(v_scale, layer)
        return encode(out_THD.flatten(1), emit)

    def _plan(self, layer: AttentionLayer, rows: RowSpan, q: torch.Tensor, k: torch.Tensor) -> Any:
        """Return the wrapper for these rows and layers of this shape. The first such layer plans it."""
        page_tokens = k.shape[1]
        heads = (layer.heads, layer.kv_heads, layer.head_dim)
        key = (layer.group, rows.decode, heads, layer.window, layer.scale, q.dtype, k.dtype, page_tokens)
        if key not in self._planned:
            self._planned[key] = PlannedWrapper(self._wrapper(rows.decode, layer, q.device))
        planned = self._planned[key]
        if planned.rows is rows:
            return planned.wrapper
        if planned.sent is not None:
            # The wrapper copies each plan from the same pinned memory, so the last copy must be complete.
            planned.sent.synchronize()
        # FlashInfer's window counts the keys before the token itself; -1 means all.
        options = dict(window_left=layer.window - 1, sm_scale=layer.scale, seq_lens=rows.kv_len_B)
        options |= dict(q_data_type=q.dtype, kv_data_type=k.dtype)
        pages = (rows.page_start_B1, rows.pages_N, rows.last_page_B)
        if rows.decode:
            planned.wrapper.plan(*pages, *heads, page_tokens, **options)
        else:
            options |= dict(causal=True, max_token_per_sequence=rows.longest)
            planned.wrapper.plan(rows.query_start_B1, *pages, *heads, page_tokens, **options)
        planned.sent = torch.cuda.Event()
        planned.sent.record()
        planned.rows = rows
        return planned.wrapper

    def _wrapper(self, decode: bool, layer: AttentionLayer, device: torch.device) -> Any:
        # The import takes seconds and compiles, so it happens only where this backend is used.
        import flashinfer

        size = max(self.config.workspace_mib << 20, _partial_bytes(layer, _processors(device)))
        if self._workspace is None or self._workspace.numel() < size:
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        if decode:
            # With tensor cores a kv head may have any number of query heads. Only fa2 splits rows.
            options = dict(use_tensor_cores=True, backend="fa2")
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", **options)
        # FlashAttention-3 reads whole tiles at a window's start, but pages before the window may be released.
        backend = "fa2" if layer.window else "auto"
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=backend)


def _partial_bytes(layer: AttentionLayer, processors: int) -> int:
    """Bytes that FlashInfer may need for split rows: float32 sums and weights for every query head, of as many tiles as
    fill the GPU with two blocks per SM."""
    return layer.heads * (2 * processors // layer.kv_heads) * TILE * (layer.head_dim + 1) * 4 + (1 << 10)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _rows(meta: BatchMeta, host: HostBounds, first: int, last: int, decode: bool) -> RowSpan:
    device, size = meta.page_table_BP.device, meta.page_tokens
    counts, lengths = host.counts[first:last], host.bounds[first:last]
    pages = [ceil_div(length, size) for length in lengths]
    start = sum(host.counts[:first])

    def on_host(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")

    page_start_B1 = on_host([0, *accumulate(pages)])
    starts_B1 = page_start_B1.to(device, non_blocking=True)
    rows_B = torch.arange(first, last, device=device)
    row_N = torch.repeat_interleave(rows_B, starts_B1.diff(), output_size=sum(pages))
    place_N = torch.arange(sum(pages), device=device) - starts_B1[row_N - first]
    return RowSpan(
        tokens=slice(start, start + sum(counts)),
        decode=decode,
        longest=max(counts),
        query_start_B1=on_host([0, *accumulate(counts)]),
        page_start_B1=page_start_B1,
        last_page_B=on_host([length - (n - 1) * size for length, n in zip(lengths, pages, strict=True)]),
        kv_len_B=on_host(lengths),
        pages_N=meta.page_table_BP[row_N, place_N],
    )


def _per_query_head(scale_K: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """Return the scale of each query head, [H, 1]."""
    return scale_K.repeat_interleave(layer.heads // layer.kv_heads)[:, None]


def _check_dtypes(q: torch.dtype, kv: torch.dtype) -> None:
    if q not in DTYPES or kv not in (q, *FLOAT8):
        raise CapabilityError(
            [
                f"attention=flashinfer has no kernel for queries in {q} over pages in {kv}. Would work: "
                "engine.dtype=bfloat16 or float16 with engine.kv_dtype=auto, fp8_e4m3 or fp8_e5m2; attention=triton."
            ]
        )
