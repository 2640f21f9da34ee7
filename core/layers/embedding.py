"""Token embedding and logits, split over ranks by vocabulary; the quantizer stores and multiplies their tables. Shapes:
T tokens, B sampled rows, C channels, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import gcd

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.checkpoint import LazyTensor
from dovetail.core.interfaces import BuildContext, LinearShape
from dovetail.core.interfaces.tuning import Tunable
from dovetail.core.layers.plain import PlainLinear
from dovetail.core.layers.share import Wanted, below, check_records, fewer_ranks, shares_of, stored_of
from dovetail.core.layers.weights import Taker, Weight, WeightSet
from dovetail.core.ops import encode
from dovetail.core.tuning.sampling import sampling_tunables


class VocabTable:
    """A rank's rows of a [vocab, channels] table, as many on every rank. Rows past the vocabulary have any values."""

    def __init__(
        self,
        name: str,
        build: BuildContext,
        vocab: int,
        channels: int,
        *,
        lookup: bool = True,
        logits: bool = False,
    ) -> None:
        """`lookup`: the table is an embedding; `logits`: a LMHead multiplies it."""
        self.name, self.vocab, self.channels, self.collective = name, vocab, channels, build.collective
        self.rows = ceil_div(vocab, build.collective.size)
        self.start = min(build.collective.rank * self.rows, vocab)
        self.stop = min(self.start + self.rows, vocab)
        shares = {ranks: gcd(channels, ceil_div(vocab, ranks)) for ranks in fewer_ranks(build)}
        shape = LinearShape(channels, self.rows, (self.rows,), "column", build.dtype, (name,), shares, channels)
        path = "lm_head" if logits else "embed"
        self.method = build.quantizer.table(path, shape, lookup=lookup) or PlainLinear()
        self.params = self.method.create(shape, build.device)

    def weights(self) -> Iterator[Taker]:
        records = self.method.tensors_of(self.name)
        yield WeightSet(
            stored_of(self.name, records, self.vocab, self.channels),
            partial(check_records, records, self.name, outputs=self.vocab, inputs=self.channels),
            self._take,
        )

    def _take(self, tensors: Mapping[str, LazyTensor]) -> None:
        if self.start == self.stop:
            return
        outputs, inputs = Wanted(self.vocab, self.start, self.stop), Wanted(self.channels, 0, self.channels)
        with below(self.name):
            share = shares_of(self.name, self.method.tensors_of(self.name), tensors, outputs, inputs)
            self.method.load(self.params, slice(0, self.stop - self.start), share)
        self.method.finish(self.params)


class VocabParallelEmbedding:
    """Token embedding. Each rank looks up the tokens it holds, and an all-reduce combines the ranks."""

    def __init__(self, table: VocabTable, scale: float = 1.0) -> None:
        """`scale`: multiplies the embeddings."""
        self.table, self.scale = table, scale

    def __call__(self, tokens_T: torch.Tensor) -> torch.Tensor:
        embeds_TC = self._look_up(tokens_T)
        return embeds_TC if self.scale == 1.0 else embeds_TC * self.scale

    def _look_up(self, tokens_T: torch.Tensor) -> torch.Tensor:
        table = self.table
        if table.collective.size == 1:
            return table.method.rows(table.params, tokens_T)
        here_T = (tokens_T >= table.start) & (tokens_T < table.stop)
        embeds_TC = table.method.rows(table.params, torch.where(here_T, tokens_T - table.start, 0))
        # Not a product: the first row of a rank without tokens may be NaN.
        return table.collective.all_reduce(torch.where(here_T.unsqueeze(-1), embeds_TC, 0))


class LMHead:
    """Logits over the vocabulary on every rank, in the model's dtype. Tied models pass their embedding table."""

    def __init__(
        self, table: VocabTable, build: BuildContext, bias: str | None = None, soft_cap: float = 0.0, scale: float = 1.0
    ) -> None:
        """`bias`: checkpoint name of the bias, for models whose head has one. `soft_cap`: logits become
        cap * tanh(logit / cap) (Gemma 2, 2024); 0 = they stay. `scale`: multiplies the logits."""
        self.table, self.bias_name, self.soft_cap, self.scale = table, bias, soft_cap, scale
        self.bias_V = None if bias is None else torch.zeros(table.rows, dtype=build.dtype, device=build.device)
        self.dtype = build.dtype
        build.tuned.append(self.tunables)

    def tunables(self, rows: int) -> Sequence[Tunable]:
        """Return the product with `rows` sampled rows, and the draws from its logits."""
        table = self.table
        share = table.vocab if self._computes_all else table.stop - table.start
        draws = sampling_tunables(table.vocab, share, self.dtype, rows)
        return [*self.table.method.tunables(self.table.params, rows), *draws]

    def __call__(self, states_BC: torch.Tensor) -> torch.Tensor:
        logits_BV = self._product(states_BC)
        if self.table.collective.size > 1:
            logits_BV = self.table.collective.all_gather(logits_BV)[..., : self.table.vocab]
        return logits_BV

    def local(self, states_BC: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Model.local_logits."""
        table = self.table
        if self._computes_all:
            return self(states_BC), 0
        return self._product(states_BC)[:, : table.stop - table.start], table.start

    @property
    def _computes_all(self) -> bool:
        """Whether every rank has all logits: there is one rank, or the last one has no part of the vocabulary."""
        table = self.table
        return table.rows * (table.collective.size - 1) >= table.vocab

    def _product(self, states_BC: torch.Tensor) -> torch.Tensor:
        method = self.table.method
        logits_BV = method.apply(self.table.params, encode(states_BC, (method.input,))[method.input], self.bias_V)
        if self.scale != 1.0:
            logits_BV = logits_BV * self.scale
        if self.soft_cap:
            logits_BV = self.soft_cap * torch.tanh(logits_BV / self.soft_cap)
        return logits_BV

    def weights(self) -> Iterator[Weight]:
        """Only the bias; the table lists its own weight."""
        if self.bias_name is not None:
            yield Weight(self.bias_name, self._take_bias, (self.table.vocab,), "zeros")

    def _take_bias(self, lazy: LazyTensor) -> None:
        start, stop = self.table.start, self.table.stop
        self.bias_V[: stop - start].copy_(lazy[start:stop])
