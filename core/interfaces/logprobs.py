"""Log-probabilities of tokens. N tokens, n most likely tokens of each."""

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
    """Sequence of TokenLogprobs over arrays of all rows of a step. An entry is made when it is read: a step does not
    make thousands of tuples on the engine's thread."""

    __slots__ = ("_chosen_N", "_ids_Nn", "_tokens", "_top", "_values_Nn")

    def __init__(
        self,
        chosen_N: NDArray[np.float32],
        values_Nn: NDArray[np.float32],
        ids_Nn: NDArray[np.int64],
        tokens: range,
        top: int,
    ) -> None:
        """`tokens`: the entries, as indices into the N tokens. `top`: most likely tokens of each, at most n."""
        self._chosen_N, self._values_Nn, self._ids_Nn = chosen_N, values_Nn, ids_Nn
        self._tokens, self._top = tokens, top

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> LogprobColumns: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | LogprobColumns:
        found = self._tokens[index]
        if isinstance(found, range):
            return LogprobColumns(self._chosen_N, self._values_Nn, self._ids_Nn, found, self._top)
        ids, values = (columns[found, : self._top].tolist() for columns in (self._ids_Nn, self._values_Nn))
        return TokenLogprobs(self._chosen_N[found].item(), tuple(zip(ids, values, strict=True)))

    def __iter__(self) -> Iterator[TokenLogprobs]:
        tokens, top = self._tokens, self._top
        columns = self._chosen_N[tokens], self._ids_Nn[tokens, :top], self._values_Nn[tokens, :top]
        for chosen, ids, values in zip(*(column.tolist() for column in columns), strict=True):
            yield TokenLogprobs(chosen, tuple(zip(ids, values, strict=True)))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the entries alone, not the arrays of the step."""
        return tuple, (tuple(self),)
