"""Ranks of a group over gloo use the tuned choices of rank 0."""

from __future__ import annotations

import torch

from dovetail.core.testing.ranks import on_ranks
from dovetail.core.tuning.startup import share
from dovetail.plugins.collective.config import NcclConfig
from dovetail.plugins.collective.nccl import NcclCollective

TEXT = "the table of rank 0: é" * 100


class Group:
    """Two ranks, of which only rank 0 has a table."""

    device = "cpu"

    def shared(self, rank: int, size: int, address: str) -> list[str]:
        collective, device = NcclCollective(NcclConfig()), torch.device("cpu")
        collective.connect(rank, size, address, device)
        try:
            return [share(text if rank == 0 else "", collective, device) for text in (TEXT, "", "x")]
        finally:
            collective.close()


def test_the_table_of_rank_0_is_everyones() -> None:
    assert on_ranks(Group(), "shared", 2) == [[TEXT, "", "x"]] * 2
