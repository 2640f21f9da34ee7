"""The prediction of matmul times, compared with times that were measured on an H200, and its use without a table."""

from __future__ import annotations

import importlib
import json
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="no Triton for this platform")

from dovetail.core import tuning
from dovetail.core.ops.tile_choice import LIBRARY_ROWS, check_matmul, listed_tile, tile_of
from dovetail.core.tuning import matmul as matmul_module
from dovetail.core.tuning.cache import CACHED
from dovetail.core.tuning.gpu import Gpu
from dovetail.core.tuning.matmul import MatmulTunable
from dovetail.core.tuning.measured import (
    Corrections,
    Measured,
    hopper_corrections,
    predicted_seconds,
    read_measured,
    text_of,
)
from dovetail.core.tuning.model import DEFERRED, library_seconds, tile_seconds
from dovetail.core.tuning.startup import predicted_table
from dovetail.core.tuning.table import Subject, TuningTable
from dovetail.core.tuning.timing import fault_of

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SHIPPED, SHIPPED_H200 = (Path(tuning.__file__).parent / f"tables/{name}_timings.json" for name in ("h100", "h200"))
TIMINGS = Path(__file__).with_name("h200.timings.jsonl")
A100 = Gpu("NVIDIA A100-SXM4-80GB", 108, 2.0e12, 1.41e9, 163 << 10, tma=False, hopper=False, flops_per_cycle=2048)


def product(outputs, inputs, rows, dtype=torch.float8_e4m3fn, gpu=Gpu()):  # noqa: B008
    weight = torch.empty(outputs, inputs, dtype=dtype, device="meta")
    return MatmulTunable(weight, rows, torch.bfloat16, gpu=gpu)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("fit_tiles")
    sys.modules.pop("fit_tiles", None)


def test_picks_are_near_the_fastest_measured_tiles(script, monkeypatch, capsys, tmp_path):
    points = script.read([TIMINGS])
    ratios = [script.pick(point, Gpu(), script.FIT)[0] for point in points]
    assert len(points) >= 40 and all(ratio >= 1 for ratio in ratios)
    assert script.geometric_mean(ratios) < 1.07 and max(ratios) < 1.8
    monkeypatch.setattr(sys, "argv", ["fit_tiles.py", str(TIMINGS), "--export", str(tmp_path / "timings.json")])
    assert script.main() == 1, "some picks take a tenth longer"
    lines = capsys.readouterr().out
    assert f"alone, {len(points)} matmuls: mean " in lines and f"corrected, {len(points)} matmuls: mean " in lines
    gpu, exported = read_measured((tmp_path / "timings.json").read_text())
    ways = sorted((one.shape, one.way) for one in points)
    assert gpu == Gpu() and sorted((one.shape, one.way) for one in exported) == ways and any(way for _, way in ways)


@pytest.mark.parametrize(("kind", "wrong"), [("bf16", 0.015), ("fp8", 0.105)])
def test_timings_of_other_shapes_correct_predictions(script, kind, wrong):
    """Each shape is judged by the timings of all others. `wrong`: share of picks that take more than a tenth longer."""
    gpu, measured = read_measured(SHIPPED.read_text())
    corrections = Corrections((gpu, measured))
    points = [one for one in measured if one.shape[3] == kind]
    alone = [script.pick(one, gpu, script.FIT)[0] for one in points]
    corrected = [script.corrected_pick(one, gpu, corrections) for one in points]
    assert script.geometric_mean(corrected) < 1.04 < script.geometric_mean(alone)
    assert max(corrected) < 1.5, "sums of split tiles take a time for each byte"
    assert sum(ratio > 1.1 for ratio in corrected) < wrong * len(points) < sum(ratio > 1.1 for ratio in alone)


def test_timings_of_one_gpu_correct_predictions_for_another(script):
    """Those of an H100 for an H200, without the shape that is judged."""
    corrections, points = Corrections(read_measured(SHIPPED.read_text())), script.read([TIMINGS])
    corrected = [script.corrected_pick(one, Gpu(), corrections) for one in points]
    alone = [script.pick(one, Gpu(), script.FIT)[0] for one in points]
    assert script.geometric_mean(corrected) < 1.04 < script.geometric_mean(alone)
    assert sum(ratio > 1.1 for ratio in corrected) < sum(ratio > 1.1 for ratio in alone)


def test_timings_of_two_gpus_correct_more_than_those_of_one(script, monkeypatch, capsys):
    """Those of the H200 have other numbers of rows."""
    shipped = [read_measured(path.read_text()) for path in (SHIPPED, SHIPPED_H200)]
    gpu, points = shipped[1]
    one, both = (
        [script.corrected_pick(point, gpu, corrections) for point in points]
        for corrections in (Corrections(shipped[0]), Corrections(*shipped))
    )
    assert script.geometric_mean(both) < 1.035 < script.geometric_mean(one)
    assert sum(ratio > 1.1 for ratio in both) < sum(ratio > 1.1 for ratio in one)
    monkeypatch.setattr(sys, "argv", ["fit_tiles.py", str(SHIPPED_H200), "--also", str(SHIPPED)])
    script.main()
    assert f"corrected, {len(points)} matmuls: mean {script.geometric_mean(both):.3f}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="GPUs with 108 and 132 multiprocessors"):
        Corrections(shipped[0], (A100, []))


def test_what_the_library_leaves_to_the_consumer_takes_no_time_in_it():
    """Scales of FP8 that the next norm applies, and a dtype that is converted."""
    weight = torch.empty(8192, 8192, dtype=torch.float8_e4m3fn, device="meta")

    def seconds(rows, dtype=torch.bfloat16, defers=False):
        return MatmulTunable(weight, rows, dtype, defers=defers, gpu=Gpu()).predicted(None)

    assert seconds(160, defers=True) < seconds(160) < seconds(160, torch.float16)
    assert seconds(160, torch.float16, defers=True) == seconds(160, torch.float16), "only bfloat16 is deferred"
    assert seconds(64, defers=True) == seconds(64) and seconds(512, defers=True) == seconds(512)
    wide = torch.empty(57344, 8192, dtype=torch.float8_e4m3fn, device="meta")
    at = {rows: MatmulTunable(wide, rows, torch.bfloat16, gpu=Gpu()).predicted(None) for rows in (128, 160, 256)}
    assert 0.9 < at[160] / at[256] < 1 and at[160] > 1.25 * at[128], "tiles of 128 rows or more"
    shape = 160, 8192, 8192, "fp8"
    timed = Measured(shape, [(None, 1e6 * predicted_seconds(None, shape, Gpu(), way=DEFERRED))], DEFERRED)
    assert Corrections((Gpu(), [timed])).near(shape)[None] == pytest.approx(1)
    integers = [library_seconds(rows, 4096, 14336, "int8", A100) for rows in (64, 96)]
    assert integers[1] < 1.05 * integers[0], "the library multiplies int8 without scales, in tiles of 64 rows, too"


@pytest.mark.parametrize(("rows", "dtype"), [(16, torch.bfloat16), (160, torch.bfloat16), (160, torch.float16)])
def test_wrong_scales_are_found_whoever_applies_them(monkeypatch, rows, dtype):
    """Also where the library leaves them to the consumer."""
    one = MatmulTunable(torch.empty(48, 64, dtype=torch.float8_e4m3fn, device="meta"), rows, dtype, defers=True)
    x_TI, weight_OI = (torch.randn(count, 64).to(torch.float8_e4m3fn) for count in (rows, 48))
    unscaled = (x_TI.float() @ weight_OI.float().t()).bfloat16()
    left = unscaled if one.way == DEFERRED else None
    monkeypatch.setattr(matmul_module, "unscaled_matmul", lambda *_: left)
    recorded = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recorded)
    run, exact = one._with_scales(x_TI, weight_OI)
    counts = torch.zeros(1, dtype=torch.int32)
    assert fault_of(lambda: run(weight_OI, counts), exact(), 1e-2) is None
    assert "off by" in (fault_of(lambda: unscaled, exact(), 1e-2) or "")
    recorded = True
    assert left is None or run(weight_OI, counts) is left, "in the timed calls the library scales nothing"


def test_a_tile_that_was_slow_nearby_is_not_picked(script):
    slow, fast = (tile_of({"tokens": 64, "outputs": 64, "inputs": width}) for width in (128, 256))
    shape = 64, 4096, 4096, "fp8"
    us = {tile: 1e6 * predicted_seconds(tile, shape, Gpu()) for tile in (slow, fast)}
    corrections = Corrections((Gpu(), [Measured(shape, [(slow, 2 * us[slow]), (fast, us[fast])])]))
    near, far = corrections.near((64, 4608, 4096, "fp8")), corrections.near((64, 4096, 65536, "fp8"))
    assert near[slow] > 1.5 and near[fast] == pytest.approx(1) and not far
    point = Measured((64, 4608, 4096, "fp8"), [(slow, 30.0), (None, 20.0)])
    assert script.corrected_pick(point, Gpu(), corrections) == 1, "the library was not timed nearby"
    assert not corrections.near(shape, but=(4096, 4096)) and not corrections.near((64, 4096, 4096, "bf16"))
    assert corrections.near(shape)[slow] > near[slow]


@pytest.mark.parametrize("processors", [78, 114, 132])
def test_tiles_with_a_program_for_each_multiprocessor_fit_the_gpu(processors):
    """The shipped timings are from a GPU with 132: more programs than an SM each would leave most of them waiting."""
    found = {
        tile_of(choice).programs
        for rows in (128, 256)
        for choice in product(37888, 3584, rows, gpu=Gpu("a Hopper GPU", processors)).candidates()
        if choice.get("specialized")
    }
    assert found == {0, processors}
    near = hopper_corrections().near((256, 37888, 3584, "fp8"))
    there = hopper_corrections().near((256, 37888, 3584, "fp8"), processors=processors)
    assert list(there.values()) == list(near.values())


def test_products_of_a_slower_tensor_core_take_longer():
    tile, shape = (
        tile_of({"tokens": 128, "outputs": 128, "inputs": 64, "warps": 8, "swap": False}),
        (512, 8192, 8192, "bf16"),
    )
    fast, slow = Gpu(), Gpu(flops_per_cycle=1024)
    for seconds in (lambda gpu: tile_seconds(tile, *shape, gpu), lambda gpu: library_seconds(*shape, gpu)):
        assert 2 < seconds(slow) / seconds(fast) < 4


def test_disturbed_timings_are_left_out(script, monkeypatch, capsys, tmp_path):
    """No tile reads 50 MB in a microsecond."""
    gpu, measured = read_measured(SHIPPED.read_text())
    assert not any(script.disturbed(one, gpu) for one in measured)
    wrong = Measured((1, 14336, 3584, "fp8"), [(tile_of({"tokens": 16, "outputs": 64, "inputs": 128}), 1.0)])
    assert script.disturbed(wrong, gpu)
    path = tmp_path / "timings.json"
    path.write_text(text_of(gpu, [*measured[:3], wrong]))
    monkeypatch.setattr(sys, "argv", ["fit_tiles.py", str(path), "--gpu", "h100", "--export", str(path)])
    script.main()
    assert "1 matmuls are left out: faster than the memory" in capsys.readouterr().out
    assert len(read_measured(path.read_text())[1]) == 3


def test_a_fit_lowers_the_loss(script, monkeypatch):
    points, gpu = script.read([TIMINGS])[:3], Gpu()
    wrong = script.replace(script.FIT, memory=0.5, library_memory=0.4)
    monkeypatch.setattr(script, "ROUNDS", 2)
    assert script.loss(points, gpu, script.fitted(points, gpu, wrong)) < script.loss(points, gpu, wrong)


@pytest.mark.parametrize("gpu", [Gpu(), A100], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("rows", [1, 33, 64, 100, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_candidates_can_be_launched(rows, dtype, gpu):
    for outputs, inputs in ((6144, 4096), (1280, 8192), (80, 2000)):
        one = product(outputs, inputs, rows, dtype, gpu)
        found = list(one.candidates())
        assert found or inputs == 2000
        for choice in found:
            check_matmul(one.key, rows, json.loads(json.dumps(choice)))
            tile = listed_tile(choice)
            if tile is None:
                assert choice[LIBRARY_ROWS] > rows and one.predicted(choice) is None
                continue
            assert one.admits(choice) and tile.shared_bytes(dtype.itemsize) <= gpu.shared
            assert gpu.hopper or not (tile.needs_hopper or tile.tma)
            assert one.predicted(choice) > 0
        assert one.predicted(None) > 0


def test_without_timings_the_rule_for_few_rows_of_fp8_comes_first():
    first = [next(iter(product(18944, 3584, rows, gpu=A100).candidates())) for rows in (16, 64, 65)]
    assert [(choice["tokens"], choice["outputs"], choice["inputs"]) for choice in first[:2]] == [
        (16, 64, 128),
        (64, 128, 128),
    ]
    assert first[2] != first[1], "beyond 64 rows the model decides"


def test_what_was_timed_nearby_comes_first():
    one = product(18944, 3584, 64)
    first = tile_of(next(iter(one.candidates())))
    near = hopper_corrections().near((64, 18944, 3584, "fp8"))
    assert first == min(near, key=lambda tile: predicted_seconds(tile, (64, 18944, 3584, "fp8"), Gpu()) * near[tile])
    found = list(one.candidates())
    assert len(found) > 100 and len({json.dumps(choice) for choice in found}) == len(found), "all are candidates, once"


def test_precise_sums_are_not_left_to_specialized_tiles():
    weight = torch.empty(4096, 4096, dtype=torch.float8_e4m3fn, device="meta")
    one = MatmulTunable(weight, 128, torch.bfloat16, fast_accum=False, gpu=Gpu())
    assert not any(choice.get("specialized") for choice in one.candidates())
    assert any(choice.get("specialized") for choice in product(4096, 4096, 128).candidates())


def test_a_tile_of_another_number_of_rows_may_not_fit():
    one = product(128256, 4096, 256)
    assert not one.admits({"tokens": 16, "outputs": 16, "inputs": 256, "split": 2}), "it needs too many counters"
    assert one.admits({"tokens": 64, "outputs": 128, "inputs": 128})


def test_the_library_is_tried_with_as_many_rows_as_activations_have_memory_for():
    for rows, more in ((48, [64]), (160, [192, 256]), (300, [320, 384, 448, 512]), (512, []), (600, [])):
        one = product(28672, 4096, rows, torch.bfloat16)
        first, *others = islice(one.candidates(), 1 + len(more) + 20)
        assert others[: len(more)] == [{LIBRARY_ROWS: many} for many in more]
        assert not any(LIBRARY_ROWS in choice for choice in (first, *others[len(more) :])), "no prediction picks it"
        assert not any(one.admits({LIBRARY_ROWS: many}) for many in (rows - 1, rows, 640, 2 * rows + 1))
    blocks = torch.empty(4096, 4096, dtype=torch.float8_e4m3fn, device="meta")
    assert not MatmulTunable(blocks, 300, torch.bfloat16, kind="fp8_block", gpu=Gpu()).admits({LIBRARY_ROWS: 512})


def test_times_of_the_library_with_more_rows_are_not_its_own(script, tmp_path):
    (line, *_) = TIMINGS.read_text().splitlines()
    facts = json.loads(line)
    padded = facts | {"times": [*facts["times"], [0.5, {LIBRARY_ROWS: 2 * facts["rows"]}]]}
    for name, content in (("as_it_was", facts), ("padded", padded)):
        (tmp_path / f"{name}.timings.jsonl").write_text(json.dumps(content))
    first, second = (script.read([tmp_path / f"{name}.timings.jsonl"]) for name in ("as_it_was", "padded"))
    assert first == second and first[0].times


def test_more_work_takes_longer():
    tile = tile_of({"tokens": 64, "outputs": 64, "inputs": 128})
    for gpu in (Gpu(), A100):
        for seconds in (lambda *shape: tile_seconds(tile, *shape), library_seconds):
            times = [seconds(64, outputs, 4096, "fp8", gpu) for outputs in (4096, 8192, 65536)]
            assert times == sorted(times)
            assert 1e-6 < times[0] < times[-1] < 1e-2


def test_shapes_without_entries_get_a_prediction():
    tunables = [product(4608, 3584, rows) for rows in (1, 64, 512)]
    found = predicted_table(tunables, TuningTable(), "NVIDIA H200")
    ((_, rows),) = found.entries.items()
    assert list(rows) == [1, 64, 512] and rows[1] is not None, "the library takes twice as long for one row of FP8"
    assert len(predicted_table(tunables, found, "NVIDIA H200")) == 0


def test_rows_that_an_interrupted_search_did_not_reach_get_a_prediction():
    """Tables of packages serve all rows: beyond their last entry the library is the choice."""
    tunables = [product(4608, 3584, rows) for rows in (1, 64, 512)]
    subject = Subject(tunables[0].op, "NVIDIA H200", tunables[0].key)
    cached, packaged = (TuningTable.of({(subject, 1): None}, origin) for origin in (CACHED, "acme"))
    ((_, rows),) = predicted_table(tunables, cached, "NVIDIA H200").entries.items()
    assert list(rows) == [64, 512]
    assert len(predicted_table(tunables, packaged, "NVIDIA H200")) == 0


class Unpredicted(MatmulTunable):
    op = "unpredicted"

    def predicted(self, choice):
        return None


@pytest.mark.parametrize("origin", [CACHED, "acme"])
def test_the_least_entry_does_not_serve_far_fewer_rows(origin):
    """A search of a few numbers of rows changes nothing for much smaller ones."""
    sizes = (1, 64, 160, 161, 256, 320)
    for kind in (MatmulTunable, Unpredicted):
        weight = torch.empty(4608, 3584, dtype=torch.float8_e4m3fn, device="meta")
        tunables = [kind(weight, rows, torch.bfloat16, gpu=Gpu()) for rows in sizes]
        subject = Subject(kind.op, "NVIDIA H200", tunables[0].key)
        tile = {"tokens": 128, "outputs": 64, "inputs": 128}
        known = TuningTable.of({(subject, 320): tile}, origin)
        ((_, found),) = predicted_table(tunables, known, "NVIDIA H200").entries.items()
        assert list(found) == [1, 64, 160]
        assert kind is MatmulTunable or set(found.values()) == {None}
        few = TuningTable.of({(subject, 16): tile}, "acme")
        assert len(predicted_table(tunables, few, "NVIDIA H200")) == 0
