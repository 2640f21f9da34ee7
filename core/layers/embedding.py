"""Token embedding and logits, split over ranks by vocabulary. Shapes: T tokens, B sampled rows, C channels, V
vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from dovetail.core.arithmetic import ceil_div
from dovetail.core.checkpoint import LazyTensor
from dovetail.core.interfaces import BuildContext
from dovetail.core.interfaces.tuning import Tunable
from dovetail.core.layers.weights import Weight
from dovetail.core.ops import matmul
from dovetail.core.ops.tiles import MOST_SHARED_TILES
from dovetail.core.tuning.matmul import matmul_tunables


class VocabTable:
    """This rank's rows of a [vocab, channels] table, zero-padded to the same size on every rank."""

    def __init__(self, name: str, build: BuildContext, vocab: int, channels: int) -> None:
        self.name, self.vocab, self.collective = name, vocab, build.collective
        rows = ceil_div(vocab, build.collective.size)
        self.start = min(build.collective.rank * rows, vocab)
        self.stop = min(self.start + rows, vocab)
        self.weight_VC = torch.zeros(rows, channels, dtype=build.dtype, device=build.device)

    def weights(self) -> Iterator[Weight]:
        yield Weight(f"{self.name}.weight", self._take, (self.vocab, self.weight_VC.shape[1]))

    def _take(self, lazy: LazyTensor) -> None:
        self.weight_VC[: self.stop - self.start].copy_(lazy[self.start : self.stop])


class VocabParallelEmbedding:
    """Token embedding. Each rank looks up the tokens it holds, and an all-reduce combines the ranks."""

    def __init__(self, table: VocabTable) -> None:
        self.table = table

    def __call__(self, tokens_T: torch.Tensor) -> torch.Tensor:
        table = self.table
        if table.collective.size == 1:
            return F.embedding(tokens_T, table.weight_VC)
        here_T = (tokens_T >= table.start) & (tokens_T < table.stop)
        embeds_TC = F.embedding(torch.where(here_T, tokens_T - table.start, 0), table.weight_VC)
        return table.collective.all_reduce(embeds_TC * here_T.unsqueeze(-1))


class LMHead:
    """Logits over the vocabulary on every rank, in the model's dtype. Tied models pass their embedding table."""

    def __init__(self, table: VocabTable, bias: str | None = None) -> None:
        """`bias`: checkpoint name of the bias, for models whose head has one."""
        self.table, self.bias_name = table, bias
        self.bias_V = None if bias is None else torch.zeros_like(table.weight_VC[:, 0])
        self.counts = torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=table.weight_VC.device)

    def tunables(self, rows: int) -> Sequence[Tunable]:
        """Return the product with `rows` sampled rows. Its owner appends this method to BuildContext.tuned."""
        return matmul_tunables(self.table.weight_VC, rows)

    def __call__(self, states_BC: torch.Tensor) -> torch.Tensor:
        logits_BV = self._product(states_BC)
        if self.table.collective.size > 1:
            logits_BV = self.table.collective.all_gather(logits_BV)[..., : self.table.vocab]
        return logits_BV

    def local(self, states_BC: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Model.local_logits."""
        table = self.table
        if len(table.weight_VC) * (table.collective.size - 1) >= table.vocab:  # one rank, or an empty last rank
            return self(states_BC), 0
        return self._product(states_BC)[:, : table.stop - table.start], table.start

    def _product(self, states_BC: torch.Tensor) -> torch.Tensor:
        return matmul(states_BC, self.table.weight_VC, self.bias_V, self.counts)

    def weights(self) -> Iterator[Weight]:
        """Only the bias; the table lists its own weight."""
        if self.bias_name is not None:
            yield Weight(self.bias_name, self._take_bias, (self.table.vocab,), "zeros")

    def _take_bias(self, lazy: LazyTensor) -> None:
        start, stop = self.table.start, self.table.stop
        self.bias_V[: stop - start].copy_(lazy[start:stop])
