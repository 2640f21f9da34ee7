"""layer.py, matmul.py and allreduce.py: their candidates, and the table of core.ops that their results become."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")

from dovetail.core.ops.choices import Choices, install
from dovetail.core.ops.tiles import MOST_SHARED_TILES, MatmulTile
from dovetail.core.tuning.candidates import candidates, used_shared
from dovetail.core.tuning.gpu import Gpu
from dovetail.core.tuning.matmul import tiles_of
from dovetail.core.tuning.table import read_table

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PROCESSORS = 132


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("matmul", "matmul_table", "layer", "allreduce", "kernels")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    install(Choices())
    for name in (*names, "emulated_ranks", "attention", "timing"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_candidates_fit_into_a_multiprocessor_and_leave_no_program_idle(scripts, rows, dtype):
    itemsize = scripts.matmul.DTYPES[dtype].itemsize
    for shape in scripts.matmul.products("70b/8")[:4]:
        of_layer = scripts.layer.candidates(shape, rows, dtype, PROCESSORS)
        for found in (list(of_layer), list(candidates(shape.outputs, shape.inputs, rows, dtype, Gpu()))):
            early = [tile for tile in found if tile.prefetch]
            assert early and len(early) < len(found), "both kernels are tried"
            for tile in early:
                assert used_shared(tile, itemsize) <= 208 << 10
                assert tile.inputs * itemsize in (128, 256, 512) and tile.warps == tile.outputs // 16
                _, tiles, blocks, programs = tile.launch(rows, shape.outputs, shape.inputs)
                assert programs % tiles == 0 and programs // tiles <= blocks
        assert {tile.prefetch_cycles for tile in scripts.layer.candidates(shape, rows, dtype, PROCESSORS)} >= {0, 1000}


def test_results_become_the_table(scripts, tmp_path, monkeypatch):
    matmul, path, table = scripts.matmul, tmp_path / "found.json", tmp_path / "table.json"
    shipped = scripts.matmul_table.TABLE
    original = shipped.read_text()
    table.write_text(original)
    monkeypatch.setattr(scripts.matmul_table, "TABLE", table)

    def write_table(*files):
        monkeypatch.setattr(sys, "argv", ["matmul.py", "--table", *map(str, files)])
        matmul.main()
        return table.read_text()

    assert write_table() == original, "the table in the repository is as the script writes it"
    shape = matmul.Product("70b/8", "qkv", 1234, 8192)
    quick, slow = (
        MatmulTile(16, 64, 256, stages=3, split=2, prefetch=5, prefetch_l2=4, prefetch_cycles=1000),
        MatmulTile(16, 64, 128),
    )
    crowded = replace(quick, tokens=8, outputs=1, split=3)
    assert crowded.launch(1, 1234, 8192)[1] > MOST_SHARED_TILES
    records = [
        matmul.record(shape, 1, "bf16", 9, {"cublas": 8.0}, [(3.0, crowded), (4.0, quick), (5.0, slow)]),
        matmul.record(shape, 16, "bf16", 9, {"cublas": 3.5}, [(4.0, quick)]),
        matmul.record(
            shape, 64, "bf16", 9, {"cublas": 9.0}, [(float(n), replace(slow, stages=n)) for n in range(2, 9)]
        ),
        matmul.record(shape, 256, "bf16", 9, {"cublas": 9.0, "tensor, fast": 1.0}, [(9.5, slow)]),
    ]
    path.write_text(matmul.written("a GPU", records))
    found = json.loads(path.read_text())["products"]
    assert found[1]["tiles"] == [{"us": 4.0, **asdict(quick)}] and len(found[2]["tiles"]) == matmul.KEPT
    write_table(path)
    tiles = tiles_of(read_table(table, "a test"))
    assert tiles.pop(("a GPU", "bf16", 1234, 8192)) == {1: quick, 16: None, 64: replace(slow, stages=2), 256: None}
    assert tiles == tiles_of(read_table(shipped, "dovetail"))


def test_wrong_results_of_a_candidate_are_found(scripts):
    fault, torch = scripts.matmul.fault, scripts.layer.torch
    exact, counts = torch.randn(4, 8), torch.zeros(3, dtype=torch.int32)
    assert fault(exact.clone, exact, counts) is None
    assert "off by" in fault(lambda: exact * 1.1, exact, counts)
    assert "off by" in fault(lambda: exact * float("nan"), exact, counts)
    assert "not the same bits" in fault(lambda: exact * (1 + 1e-4 * torch.rand(1)), exact, counts)

    def leaves_a_counter():
        counts[1] += 1
        return exact

    assert "counters" in fault(leaves_a_counter, exact, counts)
    assert not counts.any(), "otherwise every later candidate would be wrong"


def test_the_norm_applies_the_scales_that_the_librarys_matmul_omits(scripts):
    scales, tile = [], MatmulTile(16, 64, 256)
    layer = SimpleNamespace(
        edges=SimpleNamespace(run=lambda layer, scale: scales.append(scale)),
        unscaled=("o", "down"),
        x_scale="rows",
        scales={"o": "columns of o", "qkv": "columns of qkv"},
    )
    for after, chosen in (("o", None), ("o", tile), ("qkv", None)):
        scripts.layer.Layer.edge(layer, after, {after: chosen})
    assert scales == [("rows", "columns of o"), None, None]


class FakeLayer:
    """A layer whose matmuls take the times of a function."""

    rows, dtype, norm = 1, "fp8", SimpleNamespace(device="cuda")

    def __init__(self, shapes, us):
        self.shapes, self._us, self.turns = {shape.name: shape for shape in shapes}, us, []

    def is_right(self, name, tile):
        return tile.inputs != 512

    def us(self, several, repeats=5):
        self.turns.append(len(several))
        return [sum(self._us(name, tile) for name, tile in tiles.items()) for tiles in several]


@pytest.fixture
def search(scripts, monkeypatch):
    """Search for the tiles of a fake layer: (records, lines, the layer)."""

    def run(us, names=None, device="a GPU"):
        device = SimpleNamespace(name=device, multi_processor_count=PROCESSORS)
        monkeypatch.setattr(scripts.layer.torch.cuda, "get_device_properties", lambda index: device)
        lines, layer = [], FakeLayer(scripts.matmul.products("70b/8")[:4], us)
        names = names or list(scripts.layer.ORDER)
        return scripts.layer.search(layer, "70b/8", names, lines.append), lines, layer

    return run


def test_each_matmul_gets_the_tile_with_which_the_layer_is_fastest(scripts, search):
    def us(name, tile):
        if tile is None:
            return 8.0 if name == "down" else 20.0
        return 10.0 - (tile.prefetch_cycles == 500) - (tile.prefetch > 5) + (name == "down")

    records, lines, layer = search(us)
    assert [record["product"] for record in records] == list(scripts.layer.ORDER)
    for record in records:
        first = record["tiles"][0]
        assert first["prefetch_cycles"] == 500 and first["prefetch"] > 5
        assert all(tile["inputs"] != 512 for tile in record["tiles"]), "a tile with wrong results is no candidate"
    assert records[-1]["library"]["row-wise"] == 3 * 8.0 + 8.0
    assert lines[-1].endswith(" to 32.0 us a layer"), "the library's matmul of down is fastest"
    assert max(layer.turns) == scripts.matmul.KEPT + 2, "finals, the table's and the library's take turns"


def test_a_lead_within_the_drift_of_clocks_changes_nothing(scripts, search):
    shapes, device = scripts.matmul.products("70b/8")[:4], "NVIDIA H200"
    install(Choices(scripts.layer.SHIPPED.entries))
    table = {s.name: scripts.layer.choose(1, s.outputs, s.inputs, "fp8", device, PROCESSORS) for s in shapes}
    records, lines, _ = search(
        lambda name, tile: 30.0 if tile is None else 10.02 - 0.02 * (tile != table[name]), None, device
    )
    assert records == [] and lines[-1].endswith("40.1 to 40.1 us a layer: the table stays")


def test_only_named_matmuls_are_tuned(scripts, search, monkeypatch):
    (record,), lines, _ = search(lambda name, tile: 20.0 if tile is None else 10.0 - tile.prefetch, ["o"])
    assert record["product"] == "o" and record["tiles"][0]["prefetch"] > 0
    assert len(lines) == scripts.layer.ROUNDS + 1
    monkeypatch.setattr(sys, "argv", ["layer.py", "--products", "o,head"])
    with pytest.raises(SystemExit):
        scripts.layer.main()


def test_ranks_without_a_kv_head_of_their_own_share_one(scripts):
    (qkv, *_) = scripts.matmul.products("70b/16")
    assert qkv.outputs == (64 // 16 + 2) * 128


def test_emulated_ranks_call_no_nccl_and_have_equally_many_rows(scripts):
    cases = scripts.allreduce.emulated_cases(8)
    assert {name for _, _, name, _ in cases} == {"one_shot", "two_shot", "sharded"}
    assert all(columns == 8192 and kind in ("sum", "boundary") for columns, kind, _, _ in cases)
    assert [rows for _, _, name, rows in cases if name == "sharded"] == [16, 64, 128, 256, 512, 2048, 8192]


@pytest.mark.parametrize("words", ["layer", "matmul", "allreduce --ranks 2", "kernels lora"])
def test_without_gpus_they_are_refused(scripts, words, monkeypatch):
    script, *options = words.split()
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *options])
    monkeypatch.setattr(scripts.layer.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(scripts.layer.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs (a GPU|2 GPUs)"):
        getattr(scripts, script).main()
