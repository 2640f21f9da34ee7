"""Draws of tokens as the tuner sees them, without a GPU."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.ops.choices import Choices, temporarily
from dovetail.core.ops.sampling_programs import (
    DRAW,
    FILTER,
    PROGRAMS,
    check_sampling,
    chosen_programs,
    parts_of,
    sampling_key,
)
from dovetail.core.tuning.cache import CHECKS
from dovetail.core.tuning.sampling import DrawTunable, sampling_tunables, trials_on
from dovetail.core.tuning.timing import fault_of


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize(("vocab", "rows"), [(128256, 1), (32000, 24), (256000, 100), (152064, 512)])
def test_candidates_split_rows_in_different_ways(vocab, rows, filtered):
    tunable = DrawTunable(vocab, torch.bfloat16, rows, filtered=filtered)
    found = list(tunable.candidates())
    blocks = -(-vocab // 2048)
    parts = [parts_of(tunable.op, rows, blocks, choice["programs"]) for choice in found]
    assert parts_of(tunable.op, rows, blocks) not in parts and len(set(parts)) == len(parts) > 0
    assert all(tunable.admits(choice) for choice in found)
    assert len({tunable.kernel(choice) for choice in found}) == 1, "no choice needs a compilation of its own"


def test_an_entry_serves_the_numbers_of_rows_up_to_its_own():
    key = sampling_key(32000, "bfloat16")
    with temporarily(Choices({(DRAW, "a GPU", key): {24: {"programs": 256}, 64: None}})):
        found = [chosen_programs(DRAW, "a GPU", 32000, "bfloat16", rows) for rows in (1, 24, 25, 64, 65)]
        assert found == [256, 256, *[PROGRAMS[DRAW]] * 3]
        assert chosen_programs(DRAW, "a GPU", 32000, "float32", 1) == PROGRAMS[DRAW]
        assert chosen_programs(FILTER, "a GPU", 32000, "bfloat16", 1) == PROGRAMS[FILTER]


@pytest.mark.parametrize(
    ("key", "choice", "message"),
    [
        (sampling_key(9, "bfloat16"), {"programs": 0}, "programs is 0, not a whole number from 1 to 65536"),
        (sampling_key(9, "bfloat16"), {"programs": True}, "programs is True"),
        (sampling_key(9, "bfloat16"), {"parts": 2}, "the choice of a draw has programs; this one has parts"),
        (sampling_key(9, "int8"), {"programs": 2}, "dtype is 'int8'; there are bfloat16"),
        ((("vocab", 9),), {"programs": 2}, "the key of a draw has vocab and dtype; this one has vocab"),
    ],
)
def test_tables_are_checked(key, choice, message):
    for op in (DRAW, FILTER):
        with pytest.raises(ValueError, match=message):
            CHECKS[op](key, 16, choice)
    assert check_sampling(sampling_key(9, "bfloat16"), 1, {"programs": 1}) is None


@pytest.mark.parametrize("tunable", list(sampling_tunables(1000, 500, torch.float32, 7)), ids=lambda one: one.op)
def test_trials_draw_as_the_reference_and_find_a_wrong_draw(tunable):
    trials = trials_on(tunable, 2, torch.device("cpu"))
    assert tunable.vocab == {DRAW: 500, FILTER: 1000}[tunable.op]
    exact = trials.exact()
    assert fault_of(trials.runs[0], exact, trials.tolerance) is None
    assert "off by" in (fault_of(trials.runs[1], exact, trials.tolerance) or ""), "other logits"


def test_logits_of_other_dtypes_are_not_tuned():
    assert not list(sampling_tunables(1000, 500, torch.float64, 7))
