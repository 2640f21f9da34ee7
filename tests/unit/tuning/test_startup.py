"""The choices with which a rank starts, on an emulated GPU: their sources, what is refused, and that ranks agree."""

from __future__ import annotations

import gc
import json
import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="no Triton for this platform")

from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError
from dovetail.core.files import write_file
from dovetail.core.interfaces import AttentionBackend
from dovetail.core.interfaces.tuning import Tunable, make_key
from dovetail.core.ops.choices import Choices, install, installed
from dovetail.core.startup_notes import collect_notes
from dovetail.core.testing.model_driver import Alone
from dovetail.core.testing.rank_threads import on_threads
from dovetail.core.tuning import startup
from dovetail.core.tuning.cache import Cache, this_machine
from dovetail.core.tuning.packages import builtin_table
from dovetail.core.tuning.search import distinct
from dovetail.core.tuning.startup import install_choices, share, table_by_hand
from dovetail.core.tuning.table import Subject, TuningTable
from dovetail.core.worker.build import model_without_weights, tunables_without_weights
from dovetail.plugins.quant.none import Unquantized

GPU = torch.device("cuda", 0)
NAME = "NVIDIA H200"
SHAPE = make_key(weight="fp8", outputs=6144, inputs=4096)
"""A shape of the table that Dovetail ships."""
TILE = {"tokens": 16, "outputs": 64, "inputs": 128, "stages": 7}


class Scan(Tunable):
    """Operation of a package: a choice has so many lanes, and three are fastest."""

    op, key, nbytes = "acme_scan", make_key(width=8), 1

    def __init__(self, rows):
        self.rows = rows

    def candidates(self):
        return [{"lanes": lanes} for lanes in (3, 2, 4, 1, 5)]

    def trials(self, count):
        raise AssertionError("start-up measures nothing unless engine.tune=full")

    def predicted(self, choice):
        return 2.0 if choice is None else 1.0 + abs(choice["lanes"] - 3) - 2.0 * (self.rows == 4)


@pytest.fixture(autouse=True)
def gpu(monkeypatch, tmp_path):
    properties = SimpleNamespace(name=NAME, multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    install(Choices())


def table(rows, choice, key=SHAPE, gpu=NAME):
    return TuningTable.of({(Subject("matmul", gpu, key), rows): choice}, "search")


def start(*words, tunables=(), collective=None, device=GPU):
    with collect_notes() as notes:
        digest = install_choices(
            compose([*words, "app=generate"]), tunables, collective or Alone(None), device, lambda phase, share: None
        )
    return digest, list(notes)


def test_the_cache_precedes_the_tables_of_packages(tmp_path):
    shipped, notes = start()
    assert len(shipped) == 16 and notes == []
    before = installed().find("matmul", NAME, SHAPE, 1)
    assert before is not None and before != TILE
    Cache(this_machine(GPU), print).add(table(16, TILE))
    digest, _ = start()
    assert digest != shipped and installed().find("matmul", NAME, SHAPE, 16) == TILE
    assert installed().find("matmul", NAME, SHAPE, 64) is not None, "other rows keep the package's entry"
    path = tmp_path / "by_hand.json"
    write_file(path, table(16, None).text())
    by_hand, _ = start(f"engine.tune_table={path}")
    assert by_hand not in (digest, shipped) and installed().find("matmul", NAME, SHAPE, 16) is None
    assert start() == (digest, []), "the same tables give the same hash"


def test_a_gpu_without_entries_takes_those_of_one_that_is_alike(monkeypatch):
    shipped, _ = start()
    # Of GPUs that are alike, the first by name serves a shape.
    alike = "NVIDIA H100 80GB HBM3"
    tile = Choices(builtin_table().entries).find("matmul", alike, SHAPE, 16)
    new = SimpleNamespace(name="NVIDIA H800", multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: new)
    digest, (note,) = start()
    assert installed().find("matmul", new.name, SHAPE, 16) == tile and digest not in ("", shipped)
    assert f"no tuning table has {new.name}" in note and alike in note and "app=tune" in note
    Cache(this_machine(GPU), print).add(table(16, TILE, gpu=new.name))
    assert start()[1] == [], "this GPU was tuned"
    assert installed().find("matmul", new.name, SHAPE, 16) == TILE
    new.name, new.multi_processor_count = "NVIDIA H100 PCIe", 114
    assert start() == (TuningTable().hash(), []) and not installed().entries


def test_every_shape_of_the_shipped_table_has_a_choice():
    """A search that timed no candidate would record the default for all rows, which turns predictions off."""
    table = builtin_table()
    assert [subject for subject, rows in table.entries.items() if not any(rows.values())] == []


def test_a_cache_that_cannot_be_used_is_a_note():
    shipped, _ = start()
    cache = Cache(this_machine(GPU), print)
    cache.add(table(16, TILE))
    cache.table.write_text(cache.table.read_text()[:-20])
    digest, (note,) = start()
    assert digest == shipped and "the tuning cache is not used" in note and "cut off" in note


def test_nothing_is_tuned_on_a_cpu_or_when_off():
    start()
    assert start("engine.tune=off") == ("", []) and not installed().entries
    start()
    assert start(device=torch.device("cpu")) == ("", []) and not installed().entries
    assert start("engine.tune=full", device=torch.device("cpu")) == (
        "",
        ["engine.tune=full: on a CPU nothing is tuned"],
    )


def test_operations_without_entries_follow_the_prediction():
    shipped, _ = start()
    digest, notes = start(tunables=[Scan(1), Scan(4)])
    assert digest == shipped and notes == [], "the hash is of measured entries"
    assert installed().find("acme_scan", NAME, Scan.key, 1) == {"lanes": 3}
    assert installed().find("acme_scan", NAME, Scan.key, 2) == {"lanes": 3}
    assert installed().find("acme_scan", NAME, Scan.key, 9) is None
    Cache(this_machine(GPU), print).add(TuningTable.of({(Subject("acme_scan", NAME, Scan.key), 1): None}, "search"))
    start(tunables=[Scan(1)])
    assert installed().find("acme_scan", NAME, Scan.key, 1) is None, "an entry is not predicted"


def test_a_broken_table_of_a_package_is_a_note(monkeypatch):
    def broken(registry, checks):
        return TuningTable(), (SimpleNamespace(package="acme 1.0", reason="tuning table x: it is not JSON"),)

    monkeypatch.setattr(startup, "package_tables", broken)
    _, (note,) = start()
    assert note == "package acme 1.0: tuning table x: it is not JSON; the engine runs without it"


def test_what_can_be_tuned_keeps_no_collective_alive():
    """A collective holds a port until nothing refers to it."""
    build = model_without_weights(compose(["attention=triton"]), Unquantized(None), torch.device("cpu"), 0, 1).build
    collective = weakref.ref(build.collective)
    assert len(build.tuned) > 8
    gc.collect()
    gc.disable()
    try:
        del build
        assert collective() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("words", "gpu", "reason"),
    [
        (["engine.tune_table=other.json"], NAME, "for 'NVIDIA A100', and this GPU is NVIDIA H200. Would work: a table"),
        (["engine.tune_table=cut.json"], NAME, "cut.json: not a tuning table: it is not JSON.*Would work: a table"),
        (["engine.tune_table=none.json"], NAME, r"none.json: cannot be read .*Would work: a table that"),
        (["engine.tune_table=own.json"], None, r"on a CPU nothing is tuned; set engine.tune_table=null"),
        (["engine.tune_table=own.json", "engine.tune=off"], NAME, r"and engine.tune=off: set engine.tune=auto"),
    ],
)
def test_a_table_by_hand_that_does_not_fit_is_refused(tmp_path, monkeypatch, words, gpu, reason):
    monkeypatch.chdir(tmp_path)
    write_file(tmp_path / "own.json", table(1, TILE).text())
    write_file(tmp_path / "other.json", table(1, TILE, gpu="NVIDIA A100").text())
    (tmp_path / "cut.json").write_text(table(1, TILE).text()[:-9])
    with pytest.raises(ConfigError, match=reason) as caught:
        table_by_hand(compose([*words, "app=generate"]).engine, gpu)
    assert "\n" not in str(caught.value)


def test_an_unknown_value_is_refused():
    with pytest.raises(ConfigError, match="engine.tune=fast.*auto.*full.*off"):
        compose(["engine.tune=fast", "app=generate"])


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1000])
def test_ranks_share_the_text_of_rank_0(length):
    text = "é" * length
    got = on_threads(3, lambda ranks: share(text if ranks.rank == 0 else "", ranks, torch.device("cpu")))
    assert got == [text] * 3


def test_ranks_use_the_table_of_rank_0(monkeypatch):
    """Rank 1 has another cache, as on a host whose folder is not shared."""
    found = {}
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    monkeypatch.setattr(startup, "install", lambda choices: found.setdefault(len(found), choices.entries))
    real, full = torch.tensor, startup.measured_table

    def own(composition, device):
        found["measured"] = found.get("measured", 0) + 1
        return full(composition, device)

    monkeypatch.setattr(startup, "measured_table", own)
    monkeypatch.setattr(startup.torch, "tensor", lambda data, device: real(data))
    composition = compose(["app=generate"])
    hashes = on_threads(2, lambda ranks: install_choices(composition, [Scan(1)], ranks, GPU, lambda *phase: None))
    assert hashes[0] and found.pop("measured") == 1
    first, second = found.values()
    assert json.dumps(str(first)) == json.dumps(str(second)) and len(first) > 10


class FakeTimer:
    """Two lanes are fastest."""

    opened = 0

    def __init__(self, gpu, workers):
        assert gpu == NAME

    def open(self, tunable):
        FakeTimer.opened += 1

    def compile_all(self, jobs, seconds):
        return [True for _ in jobs]

    def microseconds(self, choices, final):
        return [9.0 if choice is None else 5.0 + abs(choice["lanes"] - 2) for choice in choices]

    def fault(self, choice):
        return None


def test_full_measures_what_the_cache_lacks(monkeypatch):
    monkeypatch.setattr(startup, "GraphTimer", FakeTimer)
    shares = []
    with collect_notes():
        composition = compose(["engine.tune=full", "app=generate"])

        def begin():
            return install_choices(
                composition, [Scan(1), Scan(4)], Alone(None), GPU, lambda *phase: shares.append(phase)
            )

        first = begin()
        assert FakeTimer.opened == 2 and ("tune", 0.5) in shares and ("tune", 1.0) in shares
        assert installed().find("acme_scan", NAME, Scan.key, 4) == {"lanes": 2}
        assert begin() == first and FakeTimer.opened == 2, "a second start measures nothing"
    assert start(tunables=[Scan(1), Scan(4)])[0] == first, "auto reads the cache"


def test_other_ranks_wait_for_the_search_of_rank_0():
    cpu, beats = torch.device("cpu"), []

    def work(ranks):
        if ranks.rank == 0:
            for more in (True, True, False):
                assert startup._beat(more, ranks, cpu) is more
                beats.append(more)
        else:
            startup._await_search(ranks, cpu)
            beats.append("done")

    on_threads(2, work)
    assert beats.count("done") == 1 and len(beats) == 4


def test_every_distinct_layer_of_a_model_is_tunable(monkeypatch):
    """Layers of rank 0 of two, with an attention backend that has an operation to tune."""
    layers = []
    monkeypatch.setattr(
        AttentionBackend, "tunables", lambda self, layer, build, rows: layers.append(layer) or [Scan(rows)]
    )
    composition = compose(["app=generate", "model=tiny", "engine.tp=2", "engine.dtype=bfloat16"])
    found = distinct(tunables_without_weights(composition, torch.device("cpu"), [1, 8]))
    spec = composition.part("model").target().spec(composition.part("model").config)
    shapes = {(dict(one.key)["outputs"], dict(one.key)["inputs"]) for one in found if one.op == "matmul"}
    heads, kv_heads = spec.heads // 2, max(1, spec.kv_heads // 2)
    qkv = (heads + 2 * kv_heads) * spec.head_dim
    assert shapes == {
        (qkv, spec.hidden),
        (spec.hidden, heads * spec.head_dim),
        (spec.intermediate, spec.hidden),
        (spec.hidden, spec.intermediate // 2),
        (-(-spec.vocab // 2), spec.hidden),
    }
    assert {one.rows for one in found} == {1, 8} and len(layers) == 2 * spec.layers
    assert [one.rows for one in found if one.op == "acme_scan"] == [1, 8]
