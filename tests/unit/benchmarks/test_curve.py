"""curve.py: its rule, the points that it adds and repeats, and a whole run on the CPU."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.errors import ConfigError

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "curve.py"
SIZES = [1, 2, 4, 8, 12]
WORDS = ["--", "+preset=tiny_cpu", "cost=cpu", "engine.max_len=128"]


@pytest.fixture
def curve(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return runpy.run_path(str(SCRIPT))


def test_rows_that_are_measured_without_a_list(curve: dict[str, Any]) -> None:
    """Each graph size, one row more, and the middle to the next size."""
    assert curve["default_rows"](SIZES) == [1, 2, 3, 4, 5, 6, 8, 9, 10, 12]
    sizes = curve["graph_sizes"](512)
    assert sizes[0] == 1 and sizes[-1] >= 512 > sizes[-2]
    assert {1, 512} <= set(curve["default_rows"](sizes))


def test_a_point_that_breaks_the_rule_is_measured_again_and_reported(curve: dict[str, Any]) -> None:
    """5 rows are slow once, 9 rows always. The next graph sizes of the given rows are measured, too."""
    measured: list[int] = []

    def measure(rows: int) -> float:
        measured.append(rows)
        slow = (rows == 5 and measured.count(5) == 1) or rows == 9
        return rows + 4.0 if slow else float(rows)

    times = curve["step_times"]([3, 5, 9], SIZES, measure)
    assert measured == [3, 4, 5, 8, 9, 12, 5, 8, 9, 12]
    assert times == {3: 3.0, 4: 4.0, 5: 5.0, 8: 8.0, 9: 13.0, 12: 12.0}
    alone = {name: {"us": 2.0, "limit_us": us, "efficiency": us / 2} for name, us in (("attn.o", 1.0), ("mlp.up", 1.8))}
    found = curve["points"](times, SIZES, dict.fromkeys(times, 0.5), {4: alone})
    assert [point["rows"] for point in curve["broken"](found, 1.03)] == [9]
    assert list(curve["verdict"](found)) == [
        "9 rows take 13.000 ms, 1.083 times the step of 12 rows; at most 1.03 is allowed",
        "attn.o alone is below 85% of its limit at 4 rows; the least is 50%",
    ]
    lines = [line.split() for line in curve["table"](found)]
    assert lines[0][-2:] == ["o", "up"]
    assert lines[1] == ["4", "4.000", "0.500", "12%", "0.750", "at", "3", "50%", "90%"]
    assert lines[-1] == ["12", "12.000", "0.500", "4%", "1.083", "at", "9", "-", "-"]


def test_a_run_on_the_cpu(curve: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = curve["main"](["1", "--context", "8", "--out", str(tmp_path / "tiny"), *WORDS])
    result = json.loads((tmp_path / "tiny.json").read_text())
    (point,) = result["points"]
    assert result["complete"] is True
    assert status == 0 and result["schema"] == "dovetail.curve/1" and result["graph_sizes"] == [1]
    assert 0 < point["limit_ms"] < point["ms"]
    assert list(point["products"]) == ["attn.qkv", "attn.o", "mlp.gate_up", "mlp.down"]
    assert all(one["us"] > 0 and one["limit_us"] > 0 for one in point["products"].values())
    assert (tmp_path / "tiny.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "1"
    assert curve["main"](["--draw", str(tmp_path / "tiny.json"), "--out", str(tmp_path / "all")]) == 0
    cells = capsys.readouterr().out.splitlines()[-1].split(" | ")
    assert cells[:2] == ["| tiny", "fp32"] and cells[-2:] == ["-", "PASS |"]
    assert cells[2] == f"{point['ms']:#.3g} ({point['ms'] / point['limit_ms']:.2f})"


def test_an_interrupted_run_keeps_its_points(
    curve: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(engine: object, rows: int, *rest: object) -> float:
        if rows == 2:
            raise KeyboardInterrupt
        return 0.004

    monkeypatch.setitem(curve["main"].__globals__, "decode_seconds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        curve["main"](["1", "2", "--context", "8", "--out", str(tmp_path / "tiny"), *WORDS])
    result = json.loads((tmp_path / "tiny.json").read_text())
    assert result["complete"] is False and [(one["rows"], one["ms"]) for one in result["points"]] == [(1, 4.0)]


def a_file(folder: Path, name: str, model: str, quant: str, gpu: str = "NVIDIA H200") -> str:
    """Write a curve of three graph sizes and one more point, and return its path."""
    times = {1: 2.0, 16: 2.5, 17: 3.5, 64: 3.25}
    following = {1: 16, 16: 64, 17: 64}
    points = [
        {
            "rows": n,
            "graph_size": 64 if n == 17 else n,
            "ms": ms,
            "limit_ms": 1.25,
            "ratio_to_next_size": ms / times[following[n]] if n in following else None,
        }
        for n, ms in times.items()
    ]
    if model == "qwen3_8b":
        points = [point for point in points if point["rows"] != 17]
    engine = {"device": "cuda", "dtype": "auto", "tp": 2 if model == "llama3_70b" else 1, "pp": 1, "dp": 1}
    found = {
        "schema": "dovetail.curve/1",
        "config": {
            "engine": engine,
            "model": {"path": None, "hf": {"dtype": "bfloat16"}},
            "cost": {"name": "roofline", "device": "H200"},
        },
        "choices": {"model": model, "quant": quant},
        "machine": {"gpus": [gpu]},
        "context": 100,
        "rule": 1.03,
        "points": points,
    }
    (folder / name).write_text(json.dumps(found))
    return str(folder / name)


def test_curves_are_drawn_together(
    curve: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A panel for each model, and a line for each format in it; the table in the order of the files."""
    from matplotlib.figure import Figure

    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: saved.append(figure))
    files = [
        a_file(tmp_path, "1.json", "qwen3_8b", "none"),
        a_file(tmp_path, "2.json", "llama3_70b", "fp8"),
        a_file(tmp_path, "3.json", "qwen3_8b", "fp8"),
        a_file(tmp_path, "4.json", "qwen3_8b", "fp8"),
    ]
    assert curve["main"](["--draw", *files, "--out", str(tmp_path / "all")]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "ms per decode step by number of rows, in brackets its ratio to the limit. "
        "GPU: H200; prompt tokens a row: 100; rule: 1.03.",
        "",
        "| model | format | 1 | 16 | 64 | largest ratio to the next size | rule kept |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| qwen3_8b | bf16 | 2.00 (1.60) | 2.50 (2.00) | 3.25 (2.60) | 0.800 at 1 | PASS |",
        "| qwen3_8b | fp8 (3) | 2.00 (1.60) | 2.50 (2.00) | 3.25 (2.60) | 0.800 at 1 | PASS |",
        "| qwen3_8b | fp8 (4) | 2.00 (1.60) | 2.50 (2.00) | 3.25 (2.60) | 0.800 at 1 | PASS |",
        "| llama3_70b tp=2 | fp8 | 2.00 (1.60) | 2.50 (2.00) | 3.25 (2.60) | 1.077 at 17 | breaks at 17 |",
    ]
    assert not err
    (figure,) = saved
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert list(panels) == ["qwen3_8b", "llama3_70b tp=2"]
    # Measured, limit and the points that break the rule, of each curve.
    drawn = {name: [list(line.get_xydata()[:, 0]) for line in axes.lines] for name, axes in panels.items()}
    assert drawn["qwen3_8b"] == 3 * [[1, 16, 64], [1, 16, 64], []]
    assert drawn["llama3_70b tp=2"] == [[1, 16, 17, 64], [1, 16, 17, 64], [17]]
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["bf16", "fp8 (3)", "fp8 (4)", "fp8", "measured", "limit", "over 1.03 x the next graph size"]


def test_curves_of_several_gpus_are_told_apart(
    curve: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit of another GPU than the measured one is named."""
    files = [
        a_file(tmp_path, "a.json", "qwen3_8b", "fp8"),
        a_file(tmp_path, "b.json", "qwen3_8b", "fp8", "NVIDIA L40S"),
    ]
    assert curve["main"](["--draw", *files, "--out", str(tmp_path / "all")]) == 0
    out, err = capsys.readouterr()
    assert [line.split(" | ")[1] for line in out.splitlines()[4:]] == ["fp8, H200", "fp8, L40S"]
    assert out.startswith("ms per decode step") and "GPU: H200 and L40S;" in out
    assert err == f"{files[1]}: the limits are those of H200, and L40S was measured\n"


def test_curves_without_the_names_of_their_parts(
    curve: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first ones; their overrides are composed again. The limits of this one are those of an H200."""
    file = SCRIPT.parent / "results" / "h100_curve_llama3_8b_int8.json"
    assert "choices" not in json.loads(file.read_text())
    assert curve["main"](["--draw", str(file), "--out", str(tmp_path / "all")]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("| llama3_8b | int8 | 3.42 (1.87) |")
    assert err == f"{file}: the limits are those of H200, and H100 80GB HBM3 was measured\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", r"is not JSON \("),
        ("[]", r"is not a curve \(its schema is None, not dovetail.curve/1\)"),
        ('{"schema": "dovetail.bench/2"}', r"is not a curve \(its schema is dovetail.bench/2"),
        ('{"schema": "dovetail.curve/1"}', r"is not a whole curve \(KeyError\('config'\)\); measure it again"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_curve_is_not_drawn(curve: dict[str, Any], tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "it.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"--draw: .*it.json {says}"):
        curve["main"](["--draw", str(file), "--out", str(tmp_path / "all")])
    assert not (tmp_path / "all.png").exists()


def test_a_drawing_has_neither_rows_nor_overrides(curve: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        curve["main"](["--draw", "it.json", "--out", "all", "--", "model=tiny"])
    assert ended.value.code == 2 and "--draw measures nothing: leave out rows and overrides" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("top_p=0.9", "is not JSON"),
        ("3", "is not a JSON object of SamplingParams, or a list of them"),
        ("[]", "is not a JSON object"),
        ('{"top_k": -3}', "top_k: "),
        ('[{}, {"topk": 3}]', "Did you mean `top_k`"),
        ('{"max_tokens": 3}', "max_tokens is determined by the measurement"),
    ],
)
def test_sampling_that_cannot_be_measured_is_refused_first(
    curve: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    """Status 1 would mean that a point breaks the rule."""
    with pytest.raises(SystemExit) as ended:
        curve["main"](["1", "--sampling", text, "--out", str(tmp_path / "tiny"), *WORDS])
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_files_that_cannot_be_written_are_refused_first(curve: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tiny.png").mkdir()
    with pytest.raises(ConfigError, match=r"--out: .*tiny.png cannot be written"):
        curve["main"](["1", "--out", str(tmp_path / "tiny"), *WORDS])
    assert not (tmp_path / "tiny.json").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cost=none"], "cost=none has no rates for the limit: choose cost=h200"),
        (["engine.max_seqs=4"], "engine.max_seqs=4: the rows determine"),
        (["engine.kv_pages=3"], "2 rows of 8 prompt tokens .* do not fit"),
    ],
)
def test_what_cannot_be_measured_is_refused(curve: dict[str, Any], tmp_path: Path, words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        curve["main"](["2", "--context", "8", "--out", str(tmp_path / "tiny"), *WORDS, *words])
    assert not list(tmp_path.iterdir())
