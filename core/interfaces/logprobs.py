"""Log-probabilities of tokens. N tokens, n most likely tokens of each, C columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class TokenLogprobs(NamedTuple):
    """Log-probability of one token and of the most likely tokens, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class LogprobColumns(Sequence[TokenLogprobs]):
    """Sequence of TokenLogprobs over one array of all rows of a step. An entry is made when it is read: a step does not
    make thousands of tuples on the engine's thread."""

    __slots__ = ("_packed_NC", "_tokens", "top")

    def __init__(self, packed_NC: NDArray[np.int32], tokens: range, top: int) -> None:
        """`packed_NC`: the bits of the token's log-probability and of n values, then n ids; C = 1 + 2n. `tokens`: the
        entries, as indices into N. `top`: most likely tokens of each entry, at most n."""
        self._packed_NC, self._tokens, self.top = packed_NC, tokens, top

    @property
    def packed(self) -> NDArray[np.int32]:
        """The rows of these entries."""
        tokens = self._tokens
        return self._packed_NC[tokens.start : tokens.stop] if tokens.step == 1 else self._packed_NC[list(tokens)]

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> LogprobColumns: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | LogprobColumns:
        found = self._tokens[index]
        if isinstance(found, range):
            return LogprobColumns(self._packed_NC, found, self.top)
        return next(iter(LogprobColumns(self._packed_NC, range(found, found + 1), self.top)))

    def __iter__(self) -> Iterator[TokenLogprobs]:
        rows, first = self.packed, 1 + self._packed_NC.shape[1] // 2
        floats = rows[:, : 1 + self.top].view("float32").tolist()
        for (chosen, *values), ids in zip(floats, rows[:, first : first + self.top].tolist(), strict=True):
            yield TokenLogprobs(chosen, tuple(zip(ids, values, strict=True)))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the entries alone, not the array of the step."""
        return tuple, (tuple(self),)
