"""Driver that runs an attention backend over test pages and keeps the true keys and values for comparison.

Shapes: T tokens, H query heads, K kv heads, D head dim, L KV length of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from dovetail.core.interfaces import (
    PLAIN,
    ActFormat,
    AttentionBackend,
    AttentionLayer,
    AttnCtx,
    Bundle,
    KVGroup,
    Plane,
)
from dovetail.core.testing.numeric import assert_near, fresh_random, poisoned_memory
from dovetail.core.testing.paging import PagedStep, Paging

MAX_LEN = 640
SCALE = 0.3
"""Differs from 1/sqrt(D), so that a backend must use the layer's scale."""


@dataclass(slots=True)
class Step:
    """Planned rows with one context for each KV group."""

    rows: tuple[tuple[str, int], ...]
    paged: PagedStep
    ctxs: dict[int, AttnCtx]

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        return sum(count for _, count in self.rows)

    def row_tokens(self) -> Iterable[tuple[int, int, str, int]]:
        """Yield (token of the step, row, sequence, index of the token's key in its sequence)."""
        token = 0
        for row, ((name, count), start) in enumerate(zip(self.rows, self.paged.starts, strict=True)):
            for i in range(count):
                yield token, row, name, start + i
                token += 1


class Arena:
    """One group of two layers for each window, with the true keys and values in float64 per layer and sequence."""

    kind: Literal["mla"] | None = None
    """Kind of the groups; None = by window."""

    def __init__(
        self,
        backend: AttentionBackend,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        tolerance: float,
        heads: tuple[int, int],
        head_dim: int,
        page_tokens: Sequence[int],
        windows: Sequence[int] = (0,),
        poison: float = float("nan"),
        pages: int = 64,
        kv_scales: tuple[float | torch.Tensor, float | torch.Tensor] = (1.0, 1.0),
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.kv_scales, self.soft_cap, self.sinks = kv_scales, soft_cap, sinks
        self.backend, self.device, self.dtype, self.kv_dtype = backend, device, dtype, kv_dtype
        self.tolerance, (self.heads, self.kv_heads), self.head_dim = tolerance, heads, head_dim
        planes = self.page_planes()
        self.groups = tuple(
            KVGroup(
                id=id,
                # Interleaved, so that a layer's index in its pool differs from its model index and its group.
                layers=(id, id + len(windows)),
                planes=planes,
                kind=self.kind or ("window" if window else "full"),
                window=window,
                page_tokens=page_tokens[id % len(page_tokens)],
            )
            for id, window in enumerate(windows)
        )
        self.paging = Paging(self.groups, device, pages=pages, poison=poison, rng=fresh_random())
        backend.bind(self.paging.pools)
        self.truth: dict[tuple[int, str], torch.Tensor] = {}
        """(layer index, sequence) -> [MAX_LEN, 2, K, D]: keys and values as a cache of kv_dtype holds them."""

    @property
    def columns(self) -> int:
        """Columns of the output."""
        return self.heads * self.head_dim

    def page_planes(self) -> tuple[Plane, ...]:
        return tuple(Plane(name, (self.kv_heads, self.head_dim), self.kv_dtype) for name in ("k", "v"))

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        return tuple(self.layer(group, local) for group in self.groups for local in range(len(group.layers)))

    def layer(self, group: KVGroup, local: int) -> AttentionLayer:
        return AttentionLayer(
            index=group.layers[local],
            group=group.id,
            local=local,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            scale=SCALE,
            window=group.window,
            k_scale=self.kv_scales[0],
            v_scale=self.kv_scales[1],
            soft_cap=self.soft_cap,
            sinks=self.sinks,
        )

    def plan(
        self,
        rows: Sequence[tuple[str, int]],
        *,
        num_decode: int = 0,
        slack: int = 0,
        slack_everywhere: bool = False,
        padding: int = 0,
        spare: int = 0,
        ragged: bool = False,
        gap: int = 0,
        change: Mapping[str, Any] | None = None,
    ) -> Step:
        """Plan as the engine does: plan_host once, plan_device for each group. `change` replaces metadata fields."""
        paged = self.page(
            rows, num_decode=num_decode, slack=slack, padding=padding, spare=spare, ragged=ragged, gap=gap
        )
        if slack_everywhere:
            longer = tuple(self.paging.lengths[name] + slack for name, _ in rows)
            paged.host = replace(paged.host, bounds=longer)
        if change:
            paged.metas = {id: replace(meta, **change) for id, meta in paged.metas.items()}
        return Step(tuple(rows), paged, self.contexts(paged))

    def page(self, rows: Sequence[tuple[str, int]], *, slack: int = 0, **options: Any) -> PagedStep:
        """Call Paging.step, with exact bounds for a backend that needs exact lengths on the host."""
        slack = slack if self.backend.exact_lengths == "device" else 0
        return self.paging.step(rows, slack=slack, **options)

    def contexts(self, paged: PagedStep) -> dict[int, AttnCtx]:
        with poisoned_memory():
            planned = self.backend.plan_host(paged.host)
            return {id: self.backend.plan_device(meta, paged.host, planned) for id, meta in paged.metas.items()}

    def write(self, layer: AttentionLayer, step: Step, qkv: torch.Tensor | None = None) -> torch.Tensor:
        """Write qkv (default: random values) and return q_THD."""
        if qkv is None:
            qkv = self.random_qkv(step)
        with poisoned_memory():
            q_THD = self.backend.write(layer, step.ctxs[layer.group], qkv, None)
        _, *kv = qkv.view(len(qkv), -1, self.head_dim).split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        for token, _, name, at in step.row_tokens():
            truth = self.truth.setdefault(
                (layer.index, name), torch.full((MAX_LEN, 2, self.kv_heads, self.head_dim), torch.nan).double()
            )
            pairs = zip(kv, self.kv_scales, strict=True)
            truth[at] = torch.stack([stored(x[token], scale, self.kv_dtype).cpu() for x, scale in pairs])
        return q_THD

    def planes(self) -> dict[tuple[int, str], torch.Tensor]:
        """Return copies of all planes by (group, name)."""
        pools = self.paging.pools.items()
        return {(id, name): plane.clone() for id, pool in pools for name, plane in pool.planes.items()}

    def random_qkv(self, step: Step) -> torch.Tensor:
        tokens = len(step.paged.positions_T)
        return self.random(tokens, (self.heads + 2 * self.kv_heads) * self.head_dim)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(self.dtype).to(self.device)

    def attend(
        self, layer: AttentionLayer, step: Step, q_THD: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)
    ) -> Bundle:
        with poisoned_memory():
            return self.backend.attend(layer, step.ctxs[layer.group], q_THD, emit)

    def run(self, step: Step) -> None:
        """Write and attend in every layer and check the output."""
        for layer in self.layers:
            q_THD = self.write(layer, step)
            self.check(layer, step, q_THD)

    def check(
        self, layer: AttentionLayer, step: Step, q_THD: torch.Tensor, tokens: Sequence[int] | None = None
    ) -> None:
        """Attend and compare with the loop; `tokens` selects the tokens compared (default: all but padding)."""
        got, shape = self.attend(layer, step, q_THD)[PLAIN].values, (len(q_THD), self.columns)
        assert got.shape == shape, f"attend must return shape {shape}, got {tuple(got.shape)}"
        assert got.dtype == self.dtype, f"a plain activation must have the model's dtype {self.dtype}, not {got.dtype}"
        chosen = list(range(step.tokens)) if tokens is None else list(tokens)
        expected = self.expected(layer, step, q_THD)[chosen]
        assert_near(got[chosen], expected, self.tolerance, f"attention output of layer {layer.index}")

    def expected(self, layer: AttentionLayer, step: Step, q_THD: torch.Tensor) -> torch.Tensor:
        """Compute the expected output token by token, float64 [tokens, H * D]."""
        out = []
        for token, row, name, at in step.row_tokens():
            k_LKD, v_LKD = self.truth[layer.index, name][visible_keys(layer, step, token, row, at)].unbind(1)
            out.append(attend_one(layer, q_THD[token].cpu().double(), k_LKD, v_LKD))
        return torch.stack(out)


def stored(x_KD: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return K or V as a cache of this dtype holds it, in float64; 8-bit formats store it divided by the scale."""
    if dtype.itemsize > 1:
        return x_KD.to(dtype).double()
    per_head = scale[:, None] if isinstance(scale, torch.Tensor) else scale
    largest = torch.finfo(dtype).max
    return (x_KD.float() / per_head).clamp(-largest, largest).to(dtype).double() * per_head


def visible_keys(layer: AttentionLayer, step: Step, token: int, row: int, at: int) -> list[int]:
    """Indices of the keys that a token of the step attends to. `at`: index of its own key."""
    tree = step.paged.metas[layer.group].tree if row < step.paged.host.num_decode else None
    if tree is None:
        return [key for key in range(at + 1) if not layer.window or key > at - layer.window]
    length = step.paged.starts[row] + step.rows[row][1]
    return seen_in_tree(layer.window, length, int(tree.root_T[token]), int(tree.ancestors_T[token]))


def seen_in_tree(window: int, length: int, root: int, bits: int) -> list[int]:
    """Indices of the keys that a token of a draft tree attends to: the last `window` of its path, 0 = all of it."""
    path = [*range(root + 1), *(key for key in range(root + 1, length) if bits >> (key - root - 1) & 1)]
    return path[-window:]


def attend_one(layer: AttentionLayer, q_HD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor) -> torch.Tensor:
    """Attend with one query over its visible keys, head by head."""
    share = len(q_HD) // k_LKD.shape[1]
    heads = []
    for head, q_D in enumerate(q_HD):
        scores_L = k_LKD[:, head // share] @ q_D * layer.scale
        if layer.soft_cap:
            scores_L = layer.soft_cap * torch.tanh(scores_L / layer.soft_cap)
        if layer.sinks is not None:
            scores_L = torch.cat((scores_L, layer.sinks[head : head + 1].cpu().double()))
        weights_L = torch.softmax(scores_L, dim=0)[: len(k_LKD)]
        heads.append(weights_L @ v_LKD[:, head // share])
    return torch.cat(heads)
