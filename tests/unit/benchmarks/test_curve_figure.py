"""Figures of curves."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from .conftest import BENCHMARKS


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("curve_figure")


def drawn_width(figure: ModuleType, labels: list[str], columns: int) -> float:
    """Inches of a legend, as matplotlib draws it without regard to the width of the figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    page = Figure(figsize=(40, 4))
    handles = [Line2D([], [], color="C0", marker="o", label=label) for label in labels]
    legend = page.legend(handles=handles, ncols=columns, fontsize=9, frameon=False)
    page.draw(renderer := FigureCanvasAgg(page).get_renderer())
    return float(legend.get_window_extent(renderer).width / page.dpi)


@pytest.mark.parametrize("formats", range(1, 9))
def test_the_legend_is_no_wider_than_the_figure(figure: ModuleType, formats: int) -> None:
    names = ["fp8", "mxfp4", "fp16", "bf16", "int8", "fp8_block", "int4, H200 PCIe", "nf4"]
    labels = [*names[:formats], "measured", "limit", "over 1.03 x the next graph size"]
    columns = figure._legend_columns(labels, 9.0)
    assert drawn_width(figure, labels, columns) <= 9.0
    assert columns > 1
