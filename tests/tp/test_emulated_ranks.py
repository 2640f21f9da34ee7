"""benchmarks/emulated_ranks.py: two processes emulate eight ranks, with interpreted kernels of collective=symm_mem."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("no Triton for this platform", allow_module_level=True)

from symm_mem_rank import summand

RANKS, COLUMNS = 8, 8192
Results = list[dict[str, torch.Tensor]]
pytestmark = [pytest.mark.timeout(400), pytest.mark.nightly]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("players")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("emulated_rank.py")
    players = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(RANKS), str(folder)], env=environment)
        for rank in range(2)
    ]
    try:
        assert [player.wait(timeout=300) for player in players] == [0, 0]
    finally:
        for player in players:
            player.kill()
            player.wait()
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def as_all(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The sum that a player gets: its own summand, the other's for each of the others."""
    mine, other = (summand(r, shape, torch.float16).float() for r in (rank, 1 - rank))
    return (mine + (RANKS - 1) * other).half()


def of_owners(rank: int, shape: tuple[int, ...], dim: int) -> torch.Tensor:
    """Sum of one emulating process for its part of a dimension: its own part, and the parts that the other process
    sent to each of the other ranks."""
    mine, other = (summand(r, shape, torch.float16).float().chunk(RANKS, dim) for r in (rank, 1 - rank))
    return sum((part for owner, part in enumerate(other) if owner != 1 - rank), mine[rank]).half()


@pytest.mark.parametrize("turn", [0, 1])
def test_a_player_takes_the_others_words_for_those_of_all_ranks(results: Results, turn: int) -> None:
    for rank, result in enumerate(results):
        close = {"rtol": 2e-3, "atol": 5e-2}
        torch.testing.assert_close(result[f"one_shot {turn}"], as_all(rank, (3, COLUMNS)), **close)
        torch.testing.assert_close(result[f"one_shot flat {turn}"], as_all(rank, (4, COLUMNS)), **close)
        torch.testing.assert_close(result[f"sharded {turn}"], of_owners(rank, (2 * RANKS, COLUMNS), 0), **close)
        for name, rows in (("two_shot", 3), ("two_shot flat", 4)):
            part = result[f"{name} {turn}"].chunk(RANKS, 1)[rank]
            torch.testing.assert_close(part, of_owners(rank, (rows, COLUMNS), 1), **close)


def test_the_players_agree_on_a_token(results: Results) -> None:
    assert all(result[f"argmax {turn}"].tolist() == [7, 51] for result in results for turn in range(2))
