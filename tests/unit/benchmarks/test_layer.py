"""layer.py, products.py and allreduce.py: what they try, and what tiles.py makes of what they write."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

from dovetail.core.ops.tiles import MOST_SHARED_TILES, MatmulTile

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PROCESSORS = 132


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("products", "layer", "tiles", "allreduce")
    found = {name: importlib.import_module(name) for name in names}
    yield found
    for name in (*names, "played", "attention"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_candidates_fit_into_a_multiprocessor_and_leave_no_program_idle(scripts, rows, dtype):
    alone, layer = scripts["products"], scripts["layer"]
    itemsize = alone.DTYPES[dtype].itemsize
    for shape in alone.products("70b/8")[:4]:
        for tried in (layer.candidates, alone.candidates):
            found = list(tried(shape, rows, dtype, PROCESSORS))
            early = [tile for tile in found if tile.prefetch]
            assert early and len(early) < len(found), "both kernels are tried"
            for tile in early:
                assert alone.shared_bytes(tile, itemsize) <= 208 << 10
                assert tile.inputs * itemsize in (128, 256, 512) and tile.warps == tile.outputs // 16
                _, tiles, blocks, programs = tile.launch(rows, shape.outputs, shape.inputs)
                assert programs % tiles == 0 and programs // tiles <= blocks
        assert {tile.prefetch_cycles for tile in layer.candidates(shape, rows, dtype, PROCESSORS)} >= {0, 1000}


def test_what_is_written_becomes_the_table(scripts, tmp_path):
    alone, tiles = scripts["products"], scripts["tiles"]
    shape = alone.Product("70b/8", "qkv", 1234, 8192, 8.0)
    quick, slow = (
        MatmulTile(16, 64, 256, stages=3, split=2, prefetch=5, prefetch_l2=4, prefetch_cycles=1000),
        MatmulTile(16, 64, 128),
    )
    crowded = replace(quick, tokens=8, outputs=1, split=3)
    assert crowded.launch(1, 1234, 8192)[1] > MOST_SHARED_TILES
    records = [
        alone.record(shape, 1, "bf16", 9, {"cublas": 8.0}, [(3.0, crowded), (4.0, quick), (5.0, slow)]),
        alone.record(shape, 16, "bf16", 9, {"cublas": 3.5}, [(4.0, quick)]),
        alone.record(shape, 64, "bf16", 9, {"cublas": 9.0}, [(float(n), replace(slow, stages=n)) for n in range(2, 9)]),
    ]
    path = tmp_path / "found.json"
    path.write_text(alone.written("a GPU", records))
    told = json.loads(path.read_text())
    assert told["products"][1]["tiles"] == [{"us": 4.0, **asdict(quick)}]
    assert len(told["products"][2]["tiles"]) == alone.KEPT
    table = tiles.table([path])
    assert table["a GPU", "bf16", 1234, 8192] == {1: quick, 16: None, 64: replace(slow, stages=2)}
    assert "prefetch=5, prefetch_l2=4, prefetch_cycles=1000" in tiles.source(table)


def test_what_is_wrong_with_a_candidate(scripts):
    wrong, torch = scripts["products"].wrong, scripts["layer"].torch
    exact, counts = torch.randn(4, 8), torch.zeros(3, dtype=torch.int32)
    assert wrong(exact.clone, exact, counts) is None
    assert "off by" in wrong(lambda: exact * 1.1, exact, counts)
    assert "off by" in wrong(lambda: exact * float("nan"), exact, counts)
    assert "not the same bits" in wrong(lambda: exact * (1 + 1e-4 * torch.rand(1)), exact, counts)

    def leaves_a_counter():
        counts[1] += 1
        return exact

    assert "counters" in wrong(leaves_a_counter, exact, counts)
    assert not counts.any(), "or every candidate after it would be wrong"


def test_the_norm_takes_the_scales_that_the_librarys_product_left(scripts):
    told, tile = [], MatmulTile(16, 64, 256)
    one = SimpleNamespace(
        edges=SimpleNamespace(run=lambda layer, scale: told.append(scale)),
        unscaled=("o", "down"),
        x_scale="rows",
        scales={"o": "columns of o", "qkv": "columns of qkv"},
    )
    for behind, cut in (("o", None), ("o", tile), ("qkv", None)):
        scripts["layer"].Layer.edge(one, behind, {behind: cut})
    assert told == [("rows", "columns of o"), None, None]


class Remembered:
    """A layer whose products take as long as they are said to."""

    rows, dtype, norm = 1, "fp8", SimpleNamespace(device="cuda")

    def __init__(self, shapes, us):
        self.shapes, self._us, self.turns = {shape.name: shape for shape in shapes}, us, []

    def is_right(self, name, tile):
        return tile.inputs != 512

    def us(self, several, repeats=5):
        self.turns.append(len(several))
        return [sum(self._us(name, tile) for name, tile in cuts.items()) for cuts in several]


def test_each_product_gets_the_cut_that_the_layer_is_quickest_with(scripts, monkeypatch):
    alone, layer = scripts["products"], scripts["layer"]
    device = SimpleNamespace(name="a GPU", multi_processor_count=PROCESSORS)
    monkeypatch.setattr(layer.torch.cuda, "get_device_properties", lambda index: device)

    def us(name, tile):
        if tile is None:
            return 8.0 if name == "down" else 20.0
        return 10.0 - (tile.prefetch_cycles == 500) - (tile.prefetch > 5) + (name == "down")

    said: list[str] = []
    remembered = Remembered(alone.products("70b/8")[:4], us)
    records = layer.search(remembered, "70b/8", list(layer.ORDER), said.append)
    assert [record["product"] for record in records] == list(layer.ORDER)
    for record in records:
        first = record["tiles"][0]
        assert first["prefetch_cycles"] == 500 and first["prefetch"] > 5
        assert all(tile["inputs"] != 512 for tile in record["tiles"]), "what gives wrong numbers is no candidate"
    assert records[-1]["library"]["row-wise"] == 3 * 8.0 + 8.0
    assert said[-1].endswith(" to 32.0 us a layer"), "the library's product of down is quickest"
    assert max(remembered.turns) == alone.KEPT + 2, "finals, what there was and the library's take turns"


def test_players_call_no_nccl_and_have_as_many_rows_each(scripts):
    cases = scripts["allreduce"].played_cases(8)
    assert {name for _, _, name, _ in cases} == {"one_shot", "two_shot", "sharded"}
    assert all(columns == 8192 and kind in ("sum", "boundary") for columns, kind, _, _ in cases)
    assert [rows for _, _, name, rows in cases if name == "sharded"] == [16, 64, 128, 256, 512, 2048, 8192]


def test_a_lead_within_the_clocks_wandering_changes_nothing(scripts, monkeypatch):
    alone, layer = scripts["products"], scripts["layer"]
    device = SimpleNamespace(name="NVIDIA H200", multi_processor_count=PROCESSORS)
    monkeypatch.setattr(layer.torch.cuda, "get_device_properties", lambda index: device)
    shapes = alone.products("70b/8")[:4]
    table = {s.name: layer.choose(1, s.outputs, s.inputs, "fp8", device.name, PROCESSORS) for s in shapes}

    def us(name, tile):
        return 30.0 if tile is None else 10.02 if tile == table[name] else 10.0

    said: list[str] = []
    assert layer.search(Remembered(shapes, us), "70b/8", list(layer.ORDER), said.append) == []
    assert said[-1].endswith("40.1 to 40.1 us a layer: the table stays")


def test_only_products_that_are_named_are_cut_anew(scripts, monkeypatch):
    alone, layer = scripts["products"], scripts["layer"]
    device = SimpleNamespace(name="a GPU", multi_processor_count=PROCESSORS)
    monkeypatch.setattr(layer.torch.cuda, "get_device_properties", lambda index: device)

    def us(name, tile):
        return 20.0 if tile is None else 10.0 - tile.prefetch

    said: list[str] = []
    (record,) = layer.search(Remembered(alone.products("70b/8")[:4], us), "70b/8", ["o"], said.append)
    assert record["product"] == "o" and record["tiles"][0]["prefetch"] > 0
    assert len(said) == layer.ROUNDS + 1
    monkeypatch.setattr(sys, "argv", ["layer.py", "--products", "o,head"])
    with pytest.raises(SystemExit):
        layer.main()


def test_ranks_without_a_kv_head_of_their_own_share_one(scripts):
    (qkv, *_) = scripts["products"].products("70b/16")
    assert qkv.outputs == (64 // 16 + 2) * 128


@pytest.mark.parametrize("script", ["layer", "products"])
def test_without_gpus_they_say_so(scripts, script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{script}.py"])
    monkeypatch.setattr(scripts[script].torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="needs (a GPU|2 GPUs): there (is none|are 0)"):
        scripts[script].main()
