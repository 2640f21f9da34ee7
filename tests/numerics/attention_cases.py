"""Paged attention steps of any shape, and their float64 reference, computed row by row.

Shapes: T tokens, B rows, H query heads, K kv heads, D head dim, L keys of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dovetail.core.interfaces import (
    AttentionBackend,
    AttentionLayer,
    AttnCtx,
    BatchMeta,
    HostBounds,
    KVGroup,
    Plane,
    TreeMask,
)
from dovetail.core.memory.pools import make_pools
from dovetail.core.ops.kv_write import FLOAT8, to_float8


@dataclass
class Case:
    """Rows of one step and the contents of their pages."""

    lengths: tuple[int, ...]
    """Number of keys of each row, including the step's own tokens."""
    counts: tuple[int, ...]
    """Number of tokens of each row."""
    num_decode: int = 0
    heads: tuple[int, int] = (4, 2)
    dim: int = 32
    page_tokens: int = 16
    window: int = 0
    tree: bool = False
    """Whether decode rows feed draft trees."""
    padding: int = 0
    slack: int = 0
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    head_scales: bool = False
    soft_cap: float = 0.0
    sinks: bool = False
    empty_rows: int = 0
    """Number of rows without tokens after the decode rows, as in a captured graph."""


@dataclass
class Step:
    case: Case
    layer: AttentionLayer
    ctx: AttnCtx
    q_THD: torch.Tensor
    keys: list[torch.Tensor]
    """[L, K, D] of each row, as stored in the pages, without scales."""
    values: list[torch.Tensor]


def make_step(case: Case, backend: AttentionBackend, device: torch.device) -> Step:
    """Make a step with pages in random order. Slots without a key of a row are NaN."""
    torch.seed()
    (heads, kv_heads), dim, size = case.heads, case.dim, case.page_tokens
    kv_dtype = case.kv_dtype or case.dtype
    scaled = kv_dtype in FLOAT8
    per_head = torch.rand(2, kv_heads, device=device) * 0.02 + 0.01
    scales = (per_head[0], per_head[1]) if case.head_scales else (0.013, 0.021) if scaled else (1.0, 1.0)
    layer = AttentionLayer(1, 0, 1, heads, kv_heads, dim, 1.3 * dim**-0.5, case.window, *scales, case.soft_cap)
    if case.sinks:
        layer = replace(layer, sinks=torch.linspace(-3.0, 4.0, heads, device=device))

    needed = [-(-length // size) for length in case.lengths]
    pages = sum(needed) + 3
    plane = (kv_heads, dim)
    group = KVGroup(0, (0, 1), (Plane("k", plane, kv_dtype), Plane("v", plane, kv_dtype)), page_tokens=size)
    pools = make_pools([group], {0: pages}, device)
    for tensor in pools[0].planes.values():
        if scaled:
            tensor.view(torch.uint8).fill_(0x7F)  # a NaN of both 8-bit formats
        else:
            tensor.fill_(float("nan"))
    order = (torch.randperm(pages) + 1).tolist()
    table_BP = torch.randint(0, pages + 1, (len(case.lengths), max(needed) + 2), dtype=torch.int32)
    contents: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
    for row, length in enumerate(case.lengths):
        table_BP[row, : needed[row]] = torch.tensor([order.pop() for _ in range(needed[row])], dtype=torch.int32)
        at = torch.arange(length)
        slots = (table_BP[row, at // size].long() * size + at % size).to(device)
        for name, scale in zip("kv", scales, strict=True):
            new = torch.randn(length, kv_heads, dim, device=device)
            flat = pools[0].layer(1, name).flatten(0, 1)
            if scaled:
                stored = to_float8(new, scale, kv_dtype)
                flat.view(torch.uint8)[slots] = stored.view(torch.uint8)
                contents[name].append(stored.double() * (scale[:, None] if case.head_scales else scale))
            else:
                flat[slots] = stored = new.to(kv_dtype)
                contents[name].append(stored.double())

    # Empty rows start where the next row starts, and their length is stale.
    head, tail = case.counts[: case.num_decode], case.counts[case.num_decode :]
    counts = (*head, *(0,) * case.empty_rows, *tail)
    first, last = case.lengths[: case.num_decode], case.lengths[case.num_decode :]
    lengths = (*first, *(5,) * case.empty_rows, *last)
    table_BP = torch.cat((table_BP[: case.num_decode], table_BP[: case.empty_rows], table_BP[case.num_decode :]))
    total = sum(counts) + case.padding
    starts = [sum(counts[:row]) for row in range(len(counts) + 1)]
    meta = BatchMeta(
        row_start_B1=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_len_B=torch.tensor(lengths, dtype=torch.int32, device=device),
        slots_B=torch.arange(len(counts), device=device),
        positions_T=torch.zeros(total, dtype=torch.int64, device=device),
        rows_T=torch.zeros(total, dtype=torch.int64, device=device),
        page_table_BP=table_BP.to(device),
        write_T=torch.zeros(total, dtype=torch.int64, device=device),
        page_tokens=size,
        tree=random_tree(counts, lengths, case.padding, device) if case.tree else None,
    )
    backend.bind(pools)
    host = HostBounds(
        tuple(max(count, 1) for count in counts),
        tuple(length + case.slack for length in lengths),
        case.num_decode + case.empty_rows if case.num_decode else 0,
    )
    ctx = backend.plan_device(meta, host, backend.plan_host(host))
    q_THD = torch.randn(total, heads, dim, device=device).to(case.dtype)
    return Step(case, layer, ctx, q_THD, contents["k"], contents["v"])


def random_tree(counts: tuple[int, ...], lengths: tuple[int, ...], padding: int, device: torch.device) -> TreeMask:
    """Random trees: each draft has some earlier draft or the root as its parent."""
    roots, bits = [0] * padding, [0] * padding
    for count, length in zip(reversed(counts), reversed(lengths), strict=True):
        row = [0]
        for draft in range(count - 1):
            row.append(row[int(torch.randint(max(0, draft - 4), draft + 1, ()))] | 1 << min(draft, 62))
        roots, bits = [length - count] * count + roots, row + bits
    return TreeMask(torch.tensor(roots, device=device), torch.tensor(bits, device=device))


def expected(step: Step) -> torch.Tensor:
    """Reference output, float64 [T, H * D], zero for padding."""
    case, layer, meta = step.case, step.layer, step.ctx.meta
    device = step.q_THD.device
    out = torch.zeros(step.q_THD.shape, dtype=torch.float64, device=device)
    token = 0
    for row, (length, count) in enumerate(zip(case.lengths, case.counts, strict=True)):
        q_HND = step.q_THD[token : token + count].double().transpose(0, 1)
        share = layer.heads // layer.kv_heads
        k_HLD, v_HLD = (x[row].transpose(0, 1).repeat_interleave(share, dim=0) for x in (step.keys, step.values))
        at = torch.arange(length - count, length, device=device)[:, None]
        key = torch.arange(length, device=device)[None, :]
        seen = key <= at
        if meta.tree is not None and row < case.num_decode:
            back = key - (length - count) - 1
            bits = meta.tree.ancestors_T[token : token + count, None]
            seen = (back < 0) | (bits >> back.clamp(0, 63) & 1 != 0)
        if case.window:
            # The last `window` keys of those that a token sees, which are its positions.
            seen = seen & (seen.flip(1).cumsum(1).flip(1) <= case.window)
        scores = q_HND @ k_HLD.transpose(1, 2) * layer.scale
        if layer.soft_cap:
            scores = layer.soft_cap * (scores / layer.soft_cap).tanh()
        scores = scores.masked_fill(~seen, float("-inf"))
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks.double().view(-1, 1, 1).expand(-1, count, 1)), dim=-1)
        out[token : token + count] = (scores.softmax(-1)[..., :length] @ v_HLD).transpose(0, 1)
        token += count
    return out.flatten(1)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||; NaN if any value is NaN."""
    return float((got.double() - want).norm() / want.norm())
