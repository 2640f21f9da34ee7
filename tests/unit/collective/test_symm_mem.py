"""collective=symm_mem without a GPU: which algorithm a size gets, and where it is refused."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dovetail.core.compose import Host, compose
from dovetail.core.errors import CapabilityError, DovetailError
from dovetail.core.interfaces import PLAIN, ActFormat, Partial
from dovetail.core.layers import RMSNorm
from dovetail.plugins.collective.config import SymmMemConfig
from dovetail.plugins.collective.nccl import NcclCollective
from dovetail.plugins.collective.symm_mem import collective as symm_mem
from dovetail.plugins.collective.symm_mem.choice import SizeTable, quickest
from dovetail.plugins.collective.symm_mem.collective import SymmMemCollective
from dovetail.plugins.collective.symm_mem.memory import Block, CountedAnew
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.quant.int8.format import INT8_TOKEN

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
    # Where halves take turns nothing of this is looked up for edges by copies; without them the residual stays whole.
    collective.overlapped = True
    assert [collective._edge(torch.ones(rows, 8), emit) for rows, emit, _ in picks] == ["nccl"] * 4


@pytest.mark.parametrize("copies", ["none", "end", "wait for nccl"])
def test_abort_ends_kernels_of_ours_and_of_nccl_whichever_must_be_first(
    copies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours at once; copies, unless their end waits for NCCL's."""
    order: list[str] = []
    collective: Any = SymmMemCollective(SymmMemConfig())
    collective._memory = SimpleNamespace(stop=lambda: order.append("memory"))
    collective.reducer = SimpleNamespace(mail=SimpleNamespace(stop=lambda: order.append("kernels")))
    told = threading.Event()
    if copies != "none":
        end = threading.Timer(0.2, lambda: (order.append("copies"), told.set()))
        collective.copies = mock.Mock(stop=end.start if copies == "end" else lambda: None, told=told)
    monkeypatch.setattr(symm_mem, "HEAD_START", 30 if copies == "end" else 0.1)
    monkeypatch.setattr(NcclCollective, "abort", lambda self: order.append("nccl"))
    collective.abort()
    assert order == ["memory", "kernels", *(["copies"] if copies == "end" else []), "nccl"]
    monkeypatch.setattr(NcclCollective, "close", lambda self: None)
    given = collective.copies
    collective.close()
    if copies != "none":
        given.close.assert_called_once_with()


def test_an_algorithm_asked_for_by_name_serves_beside_products_too() -> None:
    collective = SymmMemCollective(SymmMemConfig(algorithm="two_shot"))
    collective.edges, collective.overlapped = SizeTable((0,), ("two_shot",)), True
    for rows in (8, 4096):
        assert collective._edge(torch.ones(rows, 8), (FP8_TOKEN,)) == "two_shot"


def test_ranks_of_different_age_exchange_under_the_same_numbers() -> None:
    """Rank 0's process has had an engine; the other's is new. torch calls the store from C++, as a prefix does."""
    common = dist.HashStore()
    stores = [CountedAnew(common) for _ in range(2)]
    old, new = (dist.PrefixStore("symm_mem", store) for store in stores)
    for turn in range(3):
        old.set(f"memory/{turn + 4}/0", f"zero {turn}")
        new.set(f"memory/{turn}/1", f"one {turn}")
        old.wait([f"memory/{turn + 4}/1"])
        assert new.check([f"memory/{turn}/0"])
        assert (old.get(f"memory/{turn + 4}/1"), new.get(f"memory/{turn}/0")) == (b"one %d" % turn, b"zero %d" % turn)
    old.set("name", "same")
    assert new.get("name") == b"same"


def test_engines_of_one_process_exchange_under_numbers_of_their_own() -> None:
    """Rank 0's process has two engines at once, whose exchanges torch numbers through; each has another rank 1."""
    first, second = dist.HashStore(), dist.HashStore()
    mine = [CountedAnew(first), CountedAnew(second)]
    theirs = [CountedAnew(first), CountedAnew(second)]
    done = [0, 0]
    for turn, engine in enumerate((0, 1, 1, 0, 1, 0, 0)):
        mine[engine].set(f"memory/{turn}/0", f"{turn}")
        theirs[engine].wait([f"memory/{done[engine]}/0"], timedelta(seconds=1))
        assert theirs[engine].get(f"memory/{done[engine]}/0") == b"%d" % turn
        done[engine] += 1


@pytest.mark.skipif(not hasattr(dist.Store, "barrier"), reason="this torch's stores have no barrier")
def test_ranks_of_different_age_meet_at_the_stores_barrier() -> None:
    """As torch 2.13 has them meet after each exchange."""
    common = dist.HashStore()
    stores = [CountedAnew(common) for _ in range(2)]
    met = []

    def meet(rank: int) -> None:
        for turn in range(3):
            mine = turn + 4 * (rank == 0)
            stores[rank].set(f"memory/{mine}/{rank}", str(rank))
            dist.Store.barrier(stores[rank], f"memory/{mine}", 2)
            met.append((turn, stores[rank].multi_get([f"memory/{mine}/{other}" for other in range(2)])))

    threads = [threading.Thread(target=meet, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(met) == sorted((turn, [b"0", b"1"]) for turn in range(3) for _ in range(2))


@pytest.mark.parametrize("emit", [(INT8_TOKEN,), (FP8_TOKEN,)])
def test_what_the_sharded_kernel_does_not_serve_keeps_its_own_kernel(emit: tuple[ActFormat, ...]) -> None:
    """And not NCCL's edges, which are measured for what the kernel does serve."""
    collective = SymmMemCollective(SymmMemConfig(shard_rows=8))
    collective.size, collective.edges = 2, SizeTable((0,), ("two_shot",))
    both = SizeTable((0,), ("sharded",))
    collective.sharded_edges = {False: both, True: both}
    collective.reducer = reducer = mock.Mock()
    reducer.shares.side_effect = lambda x, emit: emit == (FP8_TOKEN,)
    reducer.share.return_value = reducer.boundary.return_value = (mock.sentinel.bundle, torch.ones(4, 8))
    x, norm = Partial(torch.ones(8, 8)), RMSNorm.__new__(RMSNorm)
    norm.weight, norm.eps = torch.ones(8), 1e-5
    collective.boundary(x, None, norm, emit)
    assert (reducer.share.called, reducer.boundary.called) == (emit == (FP8_TOKEN,), emit == (INT8_TOKEN,))
    assert not collective._shards(x), "another norm's edges would be NCCL's"


@pytest.mark.parametrize("algorithm", ["measured", "one_shot", "two_shot", "nccl", "sharded", "nccl_sharded"])
def test_every_algorithm_can_be_asked_for(algorithm: str) -> None:
    composed = compose(["app=generate", "collective=symm_mem", f"collective.algorithm={algorithm}"])
    assert composed.build("collective").config.algorithm == algorithm


def test_on_a_cpu_it_is_refused_with_what_works() -> None:
    overrides = ["collective=symm_mem", "executor=multiproc", "engine.tp=2", "engine.device=cpu"]
    with pytest.raises(DovetailError, match=r"collective=symm_mem.*(nccl|ordered)"):
        compose(overrides, app="generate").check(Host())
    collective = compose(["app=generate", "collective=symm_mem"]).build("collective")
    with pytest.raises(CapabilityError, match="cuda, not cpu.*collective=nccl"):
        collective.connect(0, 2, "127.0.0.1:1", torch.device("cpu"))


@pytest.mark.parametrize(("columns", "programs"), [(4096, 2), (8192, 2), (16384, 1)])
def test_programs_of_two_shot_are_resident_together(
    columns: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for each other, so a multiprocessor's registers must hold as many as a launch has for each."""
    reduce = pytest.importorskip("dovetail.plugins.collective.symm_mem.reduce", reason="no Triton for this platform")
    launches: list[tuple[Any, dict[str, Any]]] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *_, **arguments: launches.append((grid, arguments))

    monkeypatch.setattr(reduce, "two_shot", Kernel())
    reducer = reduce.Reducer(mock.MagicMock(boxes=132), 0, 8)
    x = torch.ones(300, columns).bfloat16()
    reducer.boundary(x, None, x[0], 1e-5, (PLAIN,), "two_shot")
    ((grid, arguments),) = launches
    assert grid == (programs * 132,)
    registers = -(-arguments["maxnreg"] // 8) * 8
    assert programs * 32 * arguments["num_warps"] * registers <= 65536


@pytest.mark.parametrize("gathers", [False, True])
def test_a_mailbox_has_a_box_for_each_program(gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox = pytest.importorskip("dovetail.plugins.collective.symm_mem.mailbox", reason="no Triton for this platform")
    words, zeros = mailbox.BOX_WORDS, torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **how: zeros(*size, **how))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=3))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    memory = mock.Mock()
    memory.allocate = lambda size, fill: Block(torch.full((size,), fill, dtype=torch.int32), (4096, 1 << 40), None)
    mail = mailbox.Mailbox(memory, 2, torch.device("cpu"), gathers)
    assert (len(mail.one_shot), len(mail.two_shot)) == (3 * 2 * 2 * words, 6 * 2 * 2 * words)
    assert (len(mail.one_shot_turns), len(mail.two_shot_turns)) == (3, 6)
    assert (mail.gather is None) != gathers and (not gathers or len(mail.gather) == len(mail.one_shot))
    assert mail.one_shot_peers.tolist() == [4096, 1 << 40]
    assert (mail.two_shot_peers - mail.one_shot_peers).tolist() == [4 * len(mail.one_shot)] * 2
    assert (mail.gather_peers - mail.two_shot_peers).tolist() == [4 * len(mail.two_shot)] * 2
    # Where the kernels look for the word that ends their waiting.
    told = ctypes.c_int32.from_address(int(mail.stopped.view(torch.int64)[1]))
    assert (int(mail.stopped[0]), told.value) == (0, 0)
    mail.stop()
    assert (int(mail.stopped[0]), told.value) == (0, 1)


def test_boxes_for_what_is_gathered_are_made_where_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(symm_mem, "Mailbox", lambda memory, size, device, gathers: asked.append(gathers))
    for options in ({}, {"shard_rows": None}, {"algorithm": "sharded"}, {"algorithm": "two_shot"}):
        SymmMemCollective(SymmMemConfig.model_validate(options))._made_mailbox(mock.Mock())
    assert asked == [True, False, True, False]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [96, 192, 768, 4608])
def test_no_thread_waits_for_a_copy(
    size: int, dtype: torch.dtype, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fewer words than threads, warps would hold copies, and leave the wait when each has seen its own."""
    reduce = pytest.importorskip("dovetail.plugins.collective.symm_mem.reduce", reason="no Triton for this platform")
    launches: dict[str, dict[str, Any]] = {}

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *_, **arguments: launches.update({self.name: arguments})

    for name in ("one_shot", "two_shot", "sharded"):
        monkeypatch.setattr(reduce, name, Kernel(name))
    mail = mock.MagicMock(boxes=132)
    reducer = reduce.Reducer(mail, 0, size)
    x, weight = torch.ones(2, columns, dtype=dtype), torch.ones(columns, dtype=dtype)
    for algorithm in ("one_shot", "two_shot"):
        reducer.boundary(x, None, weight, 1e-5, (PLAIN,), algorithm)
    reducer.share(x, None, weight, 1e-5, (PLAIN,))
    # What does not fit into registers goes another way.
    assert "two_shot" in launches and (len(launches) == 3 or columns == 4608)
    for name, arguments in launches.items():
        threads = 32 * arguments["num_warps"]
        assert arguments["VALUES"] // arguments["PER"] >= threads, name
        assert name != "two_shot" or arguments["SHARE"] >= threads
