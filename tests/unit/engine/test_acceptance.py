"""Estimates of accepted drafts: chains by position, trees by a share that grows with the logarithm of their drafts."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.core.engine.acceptance import MOST, PRIOR, Acceptance, TreeAcceptance

K = 16
Kind = type[Acceptance]
ROW = np.array([0]), np.array([7])
"""Slot and uid."""


def learn(acceptance: Acceptance, planned: int, accepted: float, steps: int = 200, uid: int = 7, slot: int = 0) -> None:
    """Let a row accept this number of drafts on average."""
    for step in range(steps):
        acceptance.tick()
        found = int((step + 1) * accepted) - int(step * accepted)
        acceptance.update(np.array([slot]), np.array([uid]), np.array([planned]), np.array([found]))


@pytest.mark.parametrize(("kind", "most"), [(Acceptance, 1 / (1 - PRIOR) - 1), (TreeAcceptance, PRIOR)])
def test_nothing_is_known_at_first(kind: Kind, most: float) -> None:
    survival_K = kind(2, K).survival(*ROW)[0]
    assert (np.diff(survival_K) <= 0).all() and survival_K.sum() == pytest.approx(most, rel=1e-3)


@pytest.mark.parametrize("kind", [Acceptance, TreeAcceptance])
def test_rates_less_an_error_are_still_probabilities(kind: Kind) -> None:
    acceptance = kind(2, K)
    learn(acceptance, K, 0.0, steps=4)
    low_K, high_K = acceptance.expected(-1.0), acceptance.expected(1.0)
    assert (low_K >= 0).all() and (low_K <= acceptance.expected()).all() and high_K.sum() > low_K.sum()


@pytest.mark.parametrize("mean", [0.5, 2.0, 4.0])
def test_a_whole_tree_is_expected_to_accept_what_it_did(mean: float) -> None:
    acceptance = TreeAcceptance(2, K)
    learn(acceptance, K, mean)
    survival_K = acceptance.survival(*ROW)[0]
    assert survival_K.sum() == pytest.approx(mean, rel=0.1)
    assert (np.diff(survival_K) <= 0).all(), "the first drafts are the likeliest"


@pytest.mark.parametrize("planned", [1, 3, 8])
def test_a_part_of_a_tree_foretells_the_whole(planned: int) -> None:
    """A tree of n drafts accepts a number that grows with log(1 + n), so few drafts say what more would bring."""
    rate = 0.6
    acceptance = TreeAcceptance(2, K)
    learn(acceptance, planned, rate * np.log1p(planned))
    expected_K = acceptance.survival(*ROW)[0].cumsum()
    assert expected_K[planned - 1] == pytest.approx(rate * np.log1p(planned), rel=0.1)
    assert expected_K[-1] == pytest.approx(rate * np.log1p(K), rel=0.1)


def test_a_tree_is_never_certain() -> None:
    acceptance = TreeAcceptance(2, K)
    learn(acceptance, K, float(K))
    assert acceptance.survival(*ROW).max() == MOST


@pytest.mark.parametrize("kind", [Acceptance, TreeAcceptance])
def test_a_row_knows_its_own_past(kind: Kind) -> None:
    """Another sequence in the slot begins with what all rows accept."""
    acceptance = kind(2, K)
    learn(acceptance, K, 3.0, uid=7, slot=0)
    learn(acceptance, K, 0.0, steps=25, uid=8, slot=1)
    good, bad, new = acceptance.survival(np.array([0, 1, 0]), np.array([7, 8, 9])).sum(1)
    assert good > 1.5 > 0.3 > bad and bad < new < good
    assert acceptance.last_drafted(np.array([0, 0]), np.array([7, 9])).tolist() == [200, -1]


@pytest.mark.parametrize("kind", [Acceptance, TreeAcceptance])
def test_old_counts_fade_without_drafts(kind: Kind) -> None:
    acceptance = kind(2, K)
    learn(acceptance, K, 4.0)
    learn(acceptance, K, 0.0, uid=8, slot=1)
    before = acceptance.survival(*ROW).sum()
    acceptance.tick(4000)
    assert acceptance.survival(*ROW).sum() < before / 2


def test_a_full_batch_knows_its_rates_well() -> None:
    acceptance, rng = Acceptance(256, 1), np.random.default_rng(1)
    rows, known = np.arange(256), []
    for _ in range(60):
        acceptance.tick()
        acceptance.update(rows, rows, np.ones_like(rows), rng.binomial(1, 0.8, 256))
        known.append(acceptance.survival(np.array([0]), np.array([999]))[0, 0])
    assert np.abs(np.array(known[20:]) - 0.8).max() < 0.03


def test_a_row_with_bad_luck_gets_drafts_again() -> None:
    acceptance = Acceptance(2, K)
    learn(acceptance, K, 4.0, uid=8, slot=1)
    learn(acceptance, K, 0.0, steps=3)
    learn(acceptance, K, 4.0, uid=8, slot=1)
    row, other = (acceptance.survival(*one)[0, 0] for one in (ROW, (np.array([1]), np.array([8]))))
    assert other > row > 0.7 * other
