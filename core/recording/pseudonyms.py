"""Pseudonyms: token ids of a recording that tell which prompts share a prefix, and nothing else of their text."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_U64 = np.uint64


class Pseudonyms:
    """The pseudonym of a token is a keyed hash of the sequence up to and including it, so two prompts have equal
    pseudonyms exactly as far as their tokens are equal (up to one chance in 2^31 for each pair of branches).

    The hash is polynomial: state' = state x base + value(token) modulo 2^64, with a secret odd base and a secret random
    value for each token id, then the finalizer of MurmurHash3 under a third secret. The secrets are drawn for each
    recording and never written. All tokens of a prompt, or of a step, are hashed in a few NumPy operations.
    """

    def __init__(self, vocab: int) -> None:
        self._values_V = np.frombuffer(secrets.token_bytes(8 * vocab), _U64)
        base = secrets.randbits(64) | 1
        self._base, self._inverse = _U64(base), _U64(pow(base, -1, 1 << 64))
        self._final = _U64(secrets.randbits(64))
        self._salt_key = secrets.token_bytes(32)
        self._powers_P = self._inverses_P = np.ones(1, _U64)
        self._places: dict[int, int] = {}
        """uid of an unfinished sequence -> its place in `_states_N`."""
        self._free = list(range(63, -1, -1))
        self._states_N = np.zeros(64, _U64)

    def prompt(self, ids: Sequence[int]) -> tuple[NDArray[np.int32], np.uint64]:
        """Return (pseudonyms of a prompt's tokens, state after them)."""
        n = len(ids)
        if len(self._powers_P) <= n:
            self._powers_P, self._inverses_P = (_powers(base, 2 * n) for base in (self._base, self._inverse))
        values_T = self._values_V[np.fromiter(ids, np.int64, n)]
        # state_i = base^i x (sum over j <= i of value_j x base^-j)
        states_T = np.cumsum(values_T * self._inverses_P[1 : n + 1], dtype=_U64) * self._powers_P[1 : n + 1]
        return self._ids(states_T), states_T[-1]

    def add(self, uid: int, state: np.uint64) -> None:
        """Follow a new sequence from the state after its prompt."""
        if not self._free:
            size = len(self._states_N)
            self._states_N = np.concatenate([self._states_N, np.zeros(size, _U64)])
            self._free = list(range(2 * size - 1, size - 1, -1))
        self._places[uid] = place = self._free.pop()
        self._states_N[place] = state

    def drop(self, uid: int) -> None:
        if (place := self._places.pop(uid, None)) is not None:
            self._free.append(place)

    def places(self, uids: Iterable[int]) -> list[int | None]:
        """Return the places of sequences for `follow`; None for those that are not followed."""
        return list(map(self._places.get, uids))

    def follow(self, places: Sequence[int | None], tokens_B: NDArray[np.int64]) -> NDArray[np.int32]:
        """Append one token to each of several followed sequences. Return its pseudonyms."""
        places_B = np.fromiter(places, np.int64, len(tokens_B))
        states_B = self._states_N[places_B] * self._base
        states_B += self._values_V[tokens_B]
        self._states_N[places_B] = states_B
        return self._ids(states_B)

    def salt(self, text: str) -> str:
        """Return the pseudonym of a cache salt; equal for equal salts, "" for ""."""
        return blake2b(text.encode(), digest_size=8, key=self._salt_key).hexdigest() if text else ""

    def _ids(self, states: NDArray[np.uint64]) -> NDArray[np.int32]:
        x = states ^ self._final
        x ^= x >> _U64(33)
        x *= _U64(0xFF51AFD7ED558CCD)
        x ^= x >> _U64(33)
        x *= _U64(0xC4CEB9FE1A85EC53)
        return (x >> _U64(33)).astype(np.int32)


def _powers(base: np.uint64, size: int) -> NDArray[np.uint64]:
    steps = np.full(size + 1, base, _U64)
    steps[0] = 1
    return np.cumprod(steps, dtype=_U64)
