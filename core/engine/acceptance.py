"""Estimates how many drafts a row accepts, from recent steps. Shapes: R rows, S slots, K drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

HALF_LIFE_ROWS, HALF_LIFE_STEPS = 64, 8
"""Rows with drafts after which the weight of older counts over all rows has halved, but at least the rows of so many
steps: a full batch needs that many to tell rates of 0.75 and 0.8 apart."""
HALF_LIFE_DRAFTED = 32
"""Steps with drafts of a row after which the weight of its older counts has halved."""
HALF_LIFE_IDLE = 32
"""The same in steps without drafts of the row: one that accepted nothing, by chance or not, soon gets some again, or it
falls behind the others."""
PRIOR = 0.5
"""Probability that a draft is accepted if those before it were, before any is verified: a row accepts about one."""
PRIOR_ROWS = 2.0
"""Default of `prior_rows`."""
MOST = 0.999
"""Limit of that probability: later drafts of a row never rank before earlier ones."""


class Acceptance:
    """Acceptance of drafts by row and position. A draft counts if it was planned and all drafts before it were
    accepted, so a row for which the drafter found nothing counts as one that accepted nothing."""

    def __init__(self, slots: int, lookahead: int, prior: float = 1.0, prior_rows: float = PRIOR_ROWS) -> None:
        """`prior`: weight of PRIOR in the rates over all rows, in rows with drafts; `prior_rows`: that of these rates
        in the estimate for a row, in steps with drafts."""
        self._prior, self._prior_rows = prior, prior_rows
        self._steps_K = np.arange(lookahead)
        self._reached_SK, self._accepted_SK = np.zeros((2, slots, lookahead))
        self._owner_S = np.full(slots, -1, np.int64)
        """Uid of the sequence that the slot's counts belong to."""
        self._seen_S = np.zeros(slots)
        """Number of steps with drafts when the row last had some."""
        self._all_reached_K, self._all_accepted_K = np.zeros((2, lookahead))
        self._now = 0.0
        self.evidence = 0.0
        """Recent rows with drafts, however few of a tree they had."""

    def tick(self, steps: int = 1) -> None:
        """Count steps, with drafts or not."""
        self._now += steps

    def survival(self, slots_R: NDArray[np.int64], uids_R: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the probability that draft k of a row and all drafts before it are accepted, [R, K]."""
        rate_K = self._rates()
        weight_R = self._weight(slots_R)
        weight_R1 = np.where(self._owner_S[slots_R] == uids_R, weight_R, 0.0)[:, None]
        reached_RK = weight_R1 * self._reached_SK[slots_R] + self._prior_rows
        accepted_RK = weight_R1 * self._accepted_SK[slots_R] + self._prior_rows * rate_K
        return self._survival(accepted_RK / reached_RK)

    def expected(self, errors: float = 0.0) -> NDArray[np.float64]:
        """Return the same for a row without counts, [K], with rates that are so many standard errors higher. A tree may
        accept more than one draft, and then has no error."""
        rate_K = self._rates()
        error_K = np.sqrt(np.maximum(rate_K * (1 - rate_K), 0.0) / (self._all_reached_K + 1))
        found_K: NDArray[np.float64] = self._survival(np.maximum(rate_K + errors * error_K, 0.0)[None])[0]
        return found_K

    def _survival(self, rate_RK: NDArray[np.float64]) -> NDArray[np.float64]:
        survival_RK: NDArray[np.float64] = np.minimum(rate_RK, MOST).cumprod(1)
        return survival_RK

    def _weight(self, slots_R: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the weight of each slot's counts after its steps without drafts, [R]."""
        weight_R: NDArray[np.float64] = 0.5 ** (np.maximum(self._now - self._seen_S[slots_R] - 1, 0) / HALF_LIFE_IDLE)
        return weight_R

    def last_drafted(self, slots_R: NDArray[np.int64], uids_R: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the step in which each row last had drafts; -1 = it never had."""
        return np.where(self._owner_S[slots_R] == uids_R, self._seen_S[slots_R], -1.0)

    def _rates(self) -> NDArray[np.float64]:
        """Return the probability by position over all rows, [K]. Without counts it is that of the position before."""
        rates, last = np.empty(len(self._all_reached_K)), PRIOR
        for k, (reached, accepted) in enumerate(zip(self._all_reached_K, self._all_accepted_K, strict=True)):
            rates[k] = last = (accepted + self._prior * last) / (reached + self._prior)
        return rates

    def update(
        self,
        slots_R: NDArray[np.int64],
        uids_R: NDArray[np.int64],
        planned_R: NDArray[np.int64],
        accepted_R: NDArray[np.int64],
    ) -> None:
        """Take the rows of a step that had drafts: how many were planned and accepted."""
        reached_RK, accepted_RK = self._counts(planned_R, accepted_R)
        forget = 0.5 ** min(len(slots_R) / HALF_LIFE_ROWS, 1 / HALF_LIFE_STEPS)
        self.evidence = forget * self.evidence + len(slots_R)
        self._all_reached_K = forget * self._all_reached_K + reached_RK.sum(0)
        self._all_accepted_K = forget * self._all_accepted_K + accepted_RK.sum(0)
        idle_R = self._weight(slots_R) * 0.5 ** (1 / HALF_LIFE_DRAFTED)
        kept_R1 = np.where(self._owner_S[slots_R] == uids_R, idle_R, 0.0)[:, None]
        self._reached_SK[slots_R] = kept_R1 * self._reached_SK[slots_R] + reached_RK
        self._accepted_SK[slots_R] = kept_R1 * self._accepted_SK[slots_R] + accepted_RK
        self._owner_S[slots_R], self._seen_S[slots_R] = uids_R, self._now

    def _counts(
        self, planned_R: NDArray[np.int64], accepted_R: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (how often each draft was reached, and accepted) in a step, [R, K]."""
        reached_RK = self._steps_K < np.minimum(planned_R, accepted_R + 1)[:, None]
        accepted_RK = self._steps_K < accepted_R[:, None]
        return reached_RK.astype(np.float64), accepted_RK.astype(np.float64)


class TreeAcceptance(Acceptance):
    """Acceptance of draft trees by row. Of n drafts in the order of their probability, a row accepts a number that
    grows with log(1 + n) (Sequoia, Chen et al. 2024). One rate is kept: the drafts accepted of a whole tree."""

    def __init__(self, slots: int, lookahead: int, prior: float = 1.0, prior_rows: float = PRIOR_ROWS) -> None:
        super().__init__(slots, 1, prior, prior_rows)
        self._share_K = np.log1p(np.arange(1, lookahead + 1)) / np.log1p(lookahead)
        """Share of the accepted drafts that is among the first drafts."""

    def _survival(self, rate_RK: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probability that each draft of a row is accepted."""
        survival_RK: NDArray[np.float64] = np.minimum(rate_RK * np.diff(self._share_K, prepend=0.0), MOST)
        return survival_RK

    def _counts(
        self, planned_R: NDArray[np.int64], accepted_R: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self._share_K[planned_R - 1, None], accepted_R[:, None].astype(np.float64)
