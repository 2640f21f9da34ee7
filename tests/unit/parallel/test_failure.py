"""Selection of the first failure."""

from __future__ import annotations

from dovetail.core.parallel.failure import RankFailure, describe_exit, first_cause


def failure(rank: int, at: float, *, silent: bool) -> RankFailure:
    return RankFailure(rank, at, "failed", silent)


def test_of_those_that_left_a_message_the_earliest() -> None:
    assert first_cause([failure(2, 7.0, silent=False), failure(1, 6.5, silent=False)]).rank == 1


def test_a_silent_death_comes_before_its_neighbours_complaints() -> None:
    assert first_cause([failure(1, 6.5, silent=False), failure(2, 6.6, silent=True)]).rank == 2


def test_exits_in_words() -> None:
    assert describe_exit(3, "serving") == "ended with exit status 3 and no message while serving"
    assert describe_exit(-11, "serving") == "was killed by SIGSEGV while serving"
    assert "memory" in describe_exit(-9, "serving")
