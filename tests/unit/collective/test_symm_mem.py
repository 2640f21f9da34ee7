"""collective=symm_mem without a GPU: choice of the algorithm, launches, refusals."""

from __future__ import annotations

import ctypes
import math
import os
import threading
from dataclasses import dataclass
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
from dovetail.plugins.collective.symm_mem.collective import SymmMemCollective
from dovetail.plugins.collective.symm_mem.memory import RenumberedStore, SharedBlock
from dovetail.plugins.collective.symm_mem.size_table import SizeTable, fastest
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.quant.int8.format import INT8_TOKEN

KIB, MIB = 2**10, 2**20
TABLE = fastest(
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
def test_a_size_takes_the_fastest_algorithm_of_the_next_measured_one(nbytes: int, name: str) -> None:
    assert TABLE.pick(nbytes) == name


def test_a_table_reads_as_a_sentence() -> None:
    assert str(TABLE) == "one_shot up to 16 KiB, two_shot up to 4 MiB, nccl beyond"
    assert str(SizeTable((0,), ("two_shot",))) == "two_shot"


def test_steps_of_many_rows_may_take_another_table() -> None:
    """The table depends on rows and on the emitted formats."""
    collective = SymmMemCollective(SymmMemConfig(shard_rows=8))
    collective.boundaries = SizeTable((0,), ("two_shot",))
    collective.sharded_boundaries = {False: SizeTable((0,), ("nccl",)), True: SizeTable((0,), ("sharded",))}
    bytes_alone, both = (FP8_TOKEN,), (PLAIN, FP8_TOKEN)
    picks = [(7, bytes_alone, "two_shot"), (8, bytes_alone, "sharded"), (8, both, "nccl"), (8, (PLAIN,), "nccl")]
    for rows, emit, name in picks:
        assert collective._boundary_algorithm(torch.ones(rows, 8), emit) == name
    # Overlapped boundaries do not use the tables: without copies, NCCL keeps the residual whole.
    collective.overlapped = True
    assert [collective._boundary_algorithm(torch.ones(rows, 8), emit) for rows, emit, _ in picks] == ["nccl"] * 4


@pytest.mark.parametrize("copies", ["none", "end", "wait for nccl"])
def test_abort_ends_our_kernels_then_copies_then_nccl(copies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are not waited for when their end is blocked by NCCL."""
    order: list[str] = []
    collective: Any = SymmMemCollective(SymmMemConfig())
    collective._memory = SimpleNamespace(stop=lambda: order.append("memory"))
    collective.reducer = SimpleNamespace(mail=SimpleNamespace(stop=lambda: order.append("kernels")))
    stop_issued = threading.Event()
    if copies != "none":
        end = threading.Timer(0.2, lambda: (order.append("copies"), stop_issued.set()))
        collective.copies = mock.Mock(stop=end.start if copies == "end" else lambda: None, stop_issued=stop_issued)
    monkeypatch.setattr(symm_mem, "STOP_COPIES_TIMEOUT", 30 if copies == "end" else 0.1)
    monkeypatch.setattr(NcclCollective, "abort", lambda self: order.append("nccl"))
    collective.abort()
    assert order == ["memory", "kernels", *(["copies"] if copies == "end" else []), "nccl"]
    monkeypatch.setattr(NcclCollective, "close", lambda self: None)
    given = collective.copies
    collective.close()
    if copies != "none":
        given.close.assert_called_once_with()


def test_an_algorithm_selected_by_name_serves_overlapped_calls() -> None:
    collective = SymmMemCollective(SymmMemConfig(algorithm="two_shot"))
    collective.boundaries, collective.overlapped = SizeTable((0,), ("two_shot",)), True
    for rows in (8, 4096):
        assert collective._boundary_algorithm(torch.ones(rows, 8), (FP8_TOKEN,)) == "two_shot"


def test_processes_of_different_age_exchange_under_the_same_numbers() -> None:
    """Rank 0's process has run an engine before; the other is new. torch calls the store from C++, like PrefixStore."""
    common = dist.HashStore()
    stores = [RenumberedStore(common) for _ in range(2)]
    old, new = (dist.PrefixStore("symm_mem", store) for store in stores)
    for turn in range(3):
        old.set(f"memory/{turn + 4}/0", f"zero {turn}")
        new.set(f"memory/{turn}/1", f"one {turn}")
        old.wait([f"memory/{turn + 4}/1"])
        assert new.check([f"memory/{turn}/0"])
        assert (old.get(f"memory/{turn + 4}/1"), new.get(f"memory/{turn}/0")) == (b"one %d" % turn, b"zero %d" % turn)
    old.set("name", "same")
    assert new.get("name") == b"same"


def test_engines_of_one_process_have_separate_numbers() -> None:
    """torch numbers the exchanges of both engines of rank 0's process in one sequence; their rank 1 differs."""
    first, second = dist.HashStore(), dist.HashStore()
    mine = [RenumberedStore(first), RenumberedStore(second)]
    theirs = [RenumberedStore(first), RenumberedStore(second)]
    done = [0, 0]
    for turn, engine in enumerate((0, 1, 1, 0, 1, 0, 0)):
        mine[engine].set(f"memory/{turn}/0", f"{turn}")
        theirs[engine].wait([f"memory/{done[engine]}/0"], timedelta(seconds=1))
        assert theirs[engine].get(f"memory/{done[engine]}/0") == b"%d" % turn
        done[engine] += 1


@pytest.mark.skipif(not hasattr(dist.Store, "barrier"), reason="this torch's stores have no barrier")
def test_processes_of_different_age_meet_at_the_barrier_of_the_store() -> None:
    """torch 2.13 calls it after each exchange."""
    common = dist.HashStore()
    stores = [RenumberedStore(common) for _ in range(2)]
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
def test_formats_that_the_sharded_kernel_does_not_serve_take_the_table_of_whole_residuals(
    emit: tuple[ActFormat, ...],
) -> None:
    collective = SymmMemCollective(SymmMemConfig(shard_rows=8))
    collective.size, collective.boundaries = 2, SizeTable((0,), ("two_shot",))
    both = SizeTable((0,), ("sharded",))
    collective.sharded_boundaries = {False: both, True: both}
    collective.reducer = reducer = mock.Mock()
    reducer.serves_sharded.side_effect = lambda x, emit: emit == (FP8_TOKEN,)
    reducer.sharded_boundary.return_value = reducer.boundary.return_value = (mock.sentinel.bundle, torch.ones(4, 8))
    x, norm = Partial(torch.ones(8, 8)), RMSNorm.__new__(RMSNorm)
    norm.weight, norm.eps = torch.ones(8), 1e-5
    collective.boundary(x, None, norm, emit)
    assert (reducer.sharded_boundary.called, reducer.boundary.called) == (emit == (FP8_TOKEN,), emit == (INT8_TOKEN,))
    assert not collective._shards_residual(x), "boundaries of another norm would take NCCL"


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


@dataclass
class Launch:
    programs: int
    options: dict[str, Any]

    @property
    def threads(self) -> int:
        return 32 * int(self.options["num_warps"])


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Launch]:
    """Launches by name of the kernel; nothing runs."""
    jit = pytest.importorskip("triton.runtime.jit", reason="no Triton for this platform")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter launches no kernels")
    found: dict[str, Launch] = {}

    def run(kernel: Any, *_: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        found[kernel.fn.__name__] = Launch(math.prod(grid), options)

    monkeypatch.setattr(jit.JITFunction, "run", run)
    return found


def reducer_of(size: int) -> Any:
    from dovetail.plugins.collective.symm_mem.reduce import Reducer

    return Reducer(mock.MagicMock(boxes=132), 0, size)


@pytest.mark.parametrize(("columns", "programs"), [(4096, 2), (8192, 2), (16384, 1)])
def test_programs_of_two_shot_are_resident_together(columns: int, programs: int, launches: dict[str, Launch]) -> None:
    """They wait for each other, so an SM's registers must hold its share of a launch."""
    x = torch.ones(300, columns).bfloat16()
    reducer_of(8).boundary(x, None, x[0], 1e-5, (PLAIN,), "two_shot")
    launch = launches["two_shot"]
    assert launch.programs == programs * 132
    registers = -(-launch.options["maxnreg"] // 8) * 8
    assert programs * launch.threads * registers <= 65536


@pytest.mark.parametrize("gathers", [False, True])
def test_a_mailbox_has_a_box_for_each_program(gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox = pytest.importorskip("dovetail.plugins.collective.symm_mem.mailbox", reason="no Triton for this platform")
    words, zeros = mailbox.BOX_WORDS, torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **how: zeros(*size, **how))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=3))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    memory = mock.Mock()
    memory.allocate = lambda size, fill: SharedBlock(
        torch.full((size,), fill, dtype=torch.int32), (4096, 1 << 40), None
    )
    mail = mailbox.Mailbox(memory, 2, torch.device("cpu"), gathers)
    assert (len(mail.one_shot), len(mail.two_shot)) == (3 * 2 * 2 * words, 6 * 2 * 2 * words)
    assert (len(mail.one_shot_halves), len(mail.two_shot_halves)) == (3, 6)
    assert (mail.gather is None) != gathers and (not gathers or len(mail.gather) == len(mail.one_shot))
    assert mail.one_shot_peers.tolist() == [4096, 1 << 40]
    assert (mail.two_shot_peers - mail.one_shot_peers).tolist() == [4 * len(mail.one_shot)] * 2
    assert (mail.gather_peers - mail.two_shot_peers).tolist() == [4 * len(mail.two_shot)] * 2
    # Layout that the kernels expect: their own flag, and the address of the host's.
    host_flag = ctypes.c_int32.from_address(int(mail.stopped.view(torch.int64)[1]))
    assert (int(mail.stopped[0]), host_flag.value) == (0, 0)
    mail.stop()
    assert (int(mail.stopped[0]), host_flag.value) == (0, 1)


def test_gather_boxes_are_allocated_only_for_sharded_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(symm_mem, "Mailbox", lambda memory, size, device, gathers: asked.append(gathers))
    for options in ({}, {"shard_rows": None}, {"algorithm": "sharded"}, {"algorithm": "two_shot"}):
        SymmMemCollective(SymmMemConfig.model_validate(options))._make_mailbox(mock.Mock())
    assert asked == [True, False, True, False]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [96, 192, 768, 4608])
def test_each_thread_waits_for_a_word_of_its_own(
    size: int, dtype: torch.dtype, columns: int, launches: dict[str, Launch]
) -> None:
    """With fewer words than threads several warps would hold copies of one, and leave the wait loop on their own."""
    reducer = reducer_of(size)
    x, weight = torch.ones(2, columns, dtype=dtype), torch.ones(columns, dtype=dtype)
    for algorithm in ("one_shot", "two_shot"):
        reducer.boundary(x, None, weight, 1e-5, (PLAIN,), algorithm)
    reducer.sharded_boundary(x, None, weight, 1e-5, (PLAIN,))
    # Rows that do not fit into registers take two_shot.
    assert "two_shot" in launches and (len(launches) == 3 or columns == 4608)
    for name, launch in launches.items():
        assert launch.options["VALUES"] // launch.options["PER"] >= launch.threads, name
        assert name != "two_shot" or launch.options["PART"] >= launch.threads
