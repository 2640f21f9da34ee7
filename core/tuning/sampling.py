"""Draws of tokens as Tunables: how many programs share the logits of all rows. Shapes: N rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from functools import partial
from itertools import cycle, islice

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces.tuning import Choice, Trials, Tunable
from dovetail.core.ops.sampling_programs import (
    DRAW,
    DTYPES,
    FILTER,
    PART_COLUMNS,
    PROGRAMS,
    TRIED,
    check_sampling,
    parts_of,
    sampling_key,
)
from dovetail.core.ops.step import best_reference, draw, draw_filtered, least_kept_reference

FILTERS = ((0, 0.95, 0.0), (50, 1.0, 0.0), (20, 0.8, 0.0), (0, 1.0, 0.05), (0, 1.0, 0.0))
"""(top_k, top_p, min_p) of the rows of a trial, in turn: chats' settings, and rows without filters among them."""
TEMPERATURE = 0.8
CALLS = 16
"""Least calls in a graph."""


class DrawTunable(Tunable):
    """A draw for each row of logits that the model computed, all of them with the same temperature."""

    def __init__(self, vocab: int, dtype: torch.dtype, rows: int, *, filtered: bool) -> None:
        """`filtered`: whether rows have top-k, top-p or min-p."""
        self.op = FILTER if filtered else DRAW
        self.vocab, self.dtype, self.rows = vocab, dtype, rows
        self.key = sampling_key(vocab, str(dtype).removeprefix("torch."))
        # No weight is read, and a step's logits are in the L2 cache: as few copies as of a large weight.
        self.nbytes = 1 << 30

    def candidates(self) -> Iterable[Choice]:
        """Yield the numbers of programs that split rows differently, those near the default first."""
        default = PROGRAMS[self.op]
        seen = {self._parts(default)}
        for programs in sorted(TRIED, key=lambda programs: max(programs, default) // min(programs, default)):
            if (parts := self._parts(programs)) not in seen:
                seen.add(parts)
                yield {"programs": programs}

    def _parts(self, programs: int) -> int:
        return parts_of(self.op, self.rows, ceil_div(self.vocab, PART_COLUMNS), programs)

    def admits(self, choice: Choice) -> bool:
        try:
            check_sampling(self.key, self.rows, choice)
        except ValueError:
            return False
        return True

    def kernel(self, choice: Choice) -> Hashable:
        # The number of programs is no constant of a kernel.
        return self.op, self.key

    def trials(self, count: int) -> Trials:
        device = torch.device("cuda", torch.cuda.current_device())
        return trials_on(self, count, device)


def trials_on(tunable: DrawTunable, count: int, device: torch.device) -> Trials:
    """Return calls of a draw on this device. Logits are normal numbers, flatter than those of most models."""
    rows, vocab = tunable.rows, tunable.vocab
    logits = [torch.randn(rows, vocab, device=device).mul_(3).to(tunable.dtype) for _ in range(count)]
    position_N, key_N = (torch.randint(1, 1 << 20, (rows,), device=device) for _ in range(2))
    temperature_N = torch.full((rows,), TEMPERATURE, device=device)
    columns = zip(*(FILTERS[i % len(FILTERS)] for i in range(rows)), strict=True)
    top_k_N, top_p_N, min_p_N = (torch.tensor(column, device=device) for column in columns)
    filters = temperature_N, top_k_N, top_p_N, min_p_N

    def run(logits_NV: torch.Tensor) -> torch.Tensor:
        if tunable.op == FILTER:
            return draw_filtered(logits_NV, position_N, key_N, *filters)
        return draw(logits_NV, position_N, temperature_N, key_N, True)

    def exact() -> torch.Tensor:
        least_N = least_kept_reference(logits[0], *filters) if tunable.op == FILTER else None
        return best_reference(logits[0], position_N, temperature_N, key_N, True, least_N)[1]

    x_NC = torch.randn(rows, 1024, device=device).to(tunable.dtype)
    weight_CO = torch.randn(1024, 1024, device=device).to(tunable.dtype)
    # Rounding of noise and of probabilities may change single tokens; a wrong split changes most.
    calls = [partial(run, one) for one in islice(cycle(logits), max(count, CALLS))]
    return Trials(calls, exact, lambda: x_NC @ weight_CO, tolerance=0.3)


def sampling_tunables(vocab: int, share: int, dtype: torch.dtype, rows: int) -> Iterator[Tunable]:
    """Yield the draws of a step of `rows` sampled rows. `share`: tokens of this rank's part of the vocabulary, from
    which rows without filters are drawn."""
    if str(dtype).removeprefix("torch.") in DTYPES:
        yield DrawTunable(share, dtype, rows, filtered=False)
        yield DrawTunable(vocab, dtype, rows, filtered=True)
