"""Runs a model without the engine: pages and step metadata by hand, so that the test rests on nothing of ours.

Shapes: T tokens of the step, B rows, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from dovetail.core.checkpoint import open_weights
from dovetail.core.interfaces import BatchMeta, BuildContext, Collective, ForwardContext, HostBounds, Quantizer
from dovetail.core.memory.pools import make_pools
from dovetail.plugins.attention.config import SDPAConfig
from dovetail.plugins.attention.sdpa.backend import SDPA
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama
from dovetail.plugins.quant.config import NoneConfig
from dovetail.plugins.quant.none import Unquantized

CPU = torch.device("cpu")
PAGES = 300


class Alone(Collective):
    """One rank."""

    def connect(self, rank, size, address, device): ...

    def all_reduce(self, x):
        return x

    def all_gather(self, x):
        return x

    def broadcast(self, x, root=0):
        return x

    def barrier(self): ...

    def close(self): ...


def build_model(
    config: LlamaConfig,
    *,
    quantizer: Quantizer | None = None,
    collective: Collective | None = None,
    dtype: torch.dtype = torch.float32,
    page_tokens: int = 8,
    max_len: int = 512,
    device: torch.device = CPU,
) -> Llama:
    """A model without weights."""
    return Llama(
        config,
        BuildContext(
            spec=Llama.spec(config),
            device=device,
            dtype=dtype,
            kv_dtype=dtype,
            page_tokens=page_tokens,
            max_len=max_len,
            quantizer=quantizer or Unquantized(NoneConfig()),
            attention=SDPA(SDPAConfig()),
            collective=collective or Alone(None),
        ),
    )


def load_model(folder: Path, **options) -> Llama:
    model = build_model(LlamaConfig(path=str(folder)), **options)
    model.load(open_weights(str(folder)))
    return model


class Driver:
    """Sequences by name. Pages come in shuffled order from pools full of NaN, so that a wrong page or mask shows."""

    def __init__(self, model: Llama, seed: int = 0) -> None:
        self.model = model
        self.groups, self.device = model.kv_groups, model.build.device
        self.pools = make_pools(self.groups, {group.id: PAGES for group in self.groups}, self.device)
        for pool in self.pools.values():
            for plane in pool.planes.values():
                plane.fill_(float("nan"))
        model.build.attention.bind(self.pools)
        self.free = {group.id: list(range(1, PAGES + 1)) for group in self.groups}
        for pages in self.free.values():
            random.Random(seed).shuffle(pages)
        self.tables: dict[tuple[int, str], list[int]] = {}
        self.lengths: dict[str, int] = {}

    @torch.inference_mode()
    def step(
        self,
        rows: Sequence[tuple[str, Sequence[int]]],
        num_decode: int = 0,
        slack: int = 0,
        padding: int = 0,
        taps: tuple[int, ...] = (),
    ) -> list[torch.Tensor]:
        """Feed each row's tokens; returns logits_TV of each row. The first num_decode rows go as decode rows.

        `slack` makes the host's bounds loose; `padding` adds tokens that belong to no row.
        """
        counts = [len(tokens) for _, tokens in rows]
        starts = [self.lengths.get(name, 0) for name, _ in rows]
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        positions = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
        row_of = [row for row, count in enumerate(counts) for _ in range(count)]
        for (name, _), length in zip(rows, lengths, strict=True):
            self.lengths[name] = length
        bounds = [n + (slack if row < num_decode else 0) for row, n in enumerate(lengths)]
        host = HostBounds(tuple(counts), tuple(bounds), num_decode)
        pad = [0] * padding
        attention, attn = self.model.build.attention, {}
        for group in self.groups:
            tables = [self._table(group.id, name, self.lengths[name], group.page_tokens) for name, _ in rows]
            width = max(map(len, tables)) + 2
            write = [
                tables[row][position // group.page_tokens] * group.page_tokens + position % group.page_tokens
                for row, position in zip(row_of, positions, strict=True)
            ]
            meta = BatchMeta(
                row_start_B1=self._tensor([sum(counts[:i]) for i in range(len(rows) + 1)], torch.int32),
                kv_len_B=self._tensor(lengths, torch.int32),
                slots_B=self._tensor(range(len(rows)), torch.int64),
                positions_T=self._tensor(positions + pad, torch.int64),
                rows_T=self._tensor(row_of + pad, torch.int64),
                page_table_BP=self._tensor([table + [0] * (width - len(table)) for table in tables], torch.int32),
                write_T=self._tensor(write + pad, torch.int64),
                page_tokens=group.page_tokens,
            )
            attn[group.id] = attention.plan_device(meta, host, attention.plan_host(host))
        tokens_T = self._tensor([token for _, tokens in rows for token in tokens] + pad, torch.int32)
        ctx = ForwardContext(self._tensor(positions + pad, torch.int64), attn)
        self.hidden = self.model.forward(self.model.embed(tokens_T), ctx, taps)
        logits_TV = self.model.logits(self.hidden.states[: sum(counts)])
        return list(logits_TV.split(counts))

    def _table(self, group: int, name: str, length: int, page_tokens: int) -> list[int]:
        table = self.tables.setdefault((group, name), [])
        while len(table) * page_tokens < length:
            table.append(self.free[group].pop())
        return table

    def _tensor(self, data, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(list(data), dtype=dtype, device=self.device)
