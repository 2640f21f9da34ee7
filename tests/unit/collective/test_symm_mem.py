"""collective=symm_mem without a GPU: which algorithm a size gets, and where it is refused."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.compose import Host, compose
from dovetail.core.errors import CapabilityError, DovetailError
from dovetail.core.interfaces import PLAIN
from dovetail.plugins.collective.config import SymmMemConfig
from dovetail.plugins.collective.symm_mem.choice import SizeTable, quickest
from dovetail.plugins.collective.symm_mem.collective import SymmMemCollective
from dovetail.plugins.quant.fp8.format import FP8_TOKEN

KIB, MIB = 2**10, 2**20
TABLE = quickest(
    (16 * KIB, 32 * KIB, 4 * MIB, 8 * MIB),
    {
        "one_shot": (1.0, 2.0, float("inf"), float("inf")),
        "two_shot": (2.0, 1.5, 4.0, 9.0),
        "nccl": (9.0, 9.0, 9.0, 8.0),
    },
)


@pytest.mark.parametrize(
    ("nbytes", "name"),
    [
        (1, "one_shot"),
        (16 * KIB, "one_shot"),
        (16 * KIB + 1, "two_shot"),
        (4 * MIB, "two_shot"),
        (4 * MIB + 1, "nccl"),
        (MIB * MIB, "nccl"),
    ],
)
def test_a_size_gets_what_is_quickest_at_the_next_measured_one(nbytes: int, name: str) -> None:
    assert TABLE.pick(nbytes) == name


def test_a_table_reads_as_a_sentence() -> None:
    assert str(TABLE) == "one_shot up to 16 KiB, two_shot up to 4 MiB, nccl beyond"
    assert str(SizeTable((0,), ("two_shot",))) == "two_shot"


def test_steps_of_many_rows_may_take_another_table() -> None:
    """Chosen by rows, then by bytes and by what is emitted."""
    collective = SymmMemCollective(SymmMemConfig(shard_rows=8))
    collective.edges = SizeTable((0,), ("two_shot",))
    collective.sharded_edges = {False: SizeTable((0,), ("nccl",)), True: SizeTable((0,), ("sharded",))}
    bytes_alone, both = (FP8_TOKEN,), (PLAIN, FP8_TOKEN)
    picks = [(7, bytes_alone, "two_shot"), (8, bytes_alone, "sharded"), (8, both, "nccl"), (8, (PLAIN,), "nccl")]
    for rows, emit, name in picks:
        assert collective._edge(torch.ones(rows, 8), emit) == name


def test_rows_to_shard_from_have_a_meaning_where_it_is_measured() -> None:
    assert compose(["app=generate", "collective=symm_mem", "collective.shard_rows=64"]).part("collective")
    with pytest.raises(DovetailError, match=r"shard_rows=64 is for algorithm=measured, not for two_shot"):
        compose(["app=generate", "collective=symm_mem", "collective.shard_rows=64", "collective.algorithm=two_shot"])


def test_on_a_cpu_it_is_refused_with_what_works() -> None:
    overrides = ["collective=symm_mem", "executor=multiproc", "engine.tp=2", "engine.device=cpu"]
    with pytest.raises(DovetailError, match=r"collective=symm_mem.*(nccl|ordered)"):
        compose(overrides, app="generate").check(Host())
    collective = compose(["app=generate", "collective=symm_mem"]).build("collective")
    with pytest.raises(CapabilityError, match="cuda, not cpu.*collective=nccl"):
        collective.connect(0, 2, "127.0.0.1:1", torch.device("cpu"))
