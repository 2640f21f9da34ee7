"""A package that ends the process in which it is imported is named by app=check."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.core.compose import probe
from dovetail.core.compose.cli import main


def install(site: Path, name: str, source: str) -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dovetail]\n{name} = {name}\n")
    (site / f"{name}.py").write_text(source)


@pytest.mark.parametrize(
    ("source", "seconds", "says"),
    [
        ("import ctypes; ctypes.string_at(0)", 60.0, "ends the process by SIGSEGV"),
        pytest.param(
            "import time; time.sleep(600)", 20.0, "has not ended after 20 s", marks=pytest.mark.nightly, id="hangs"
        ),
    ],
)
def test_a_package_that_no_process_survives_is_named(
    source: str,
    seconds: float,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(tmp_path, "crashing", source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(probe, "SECONDS", seconds)
    assert main(["app=check", "check.package=other"]) == 2
    assert capsys.readouterr().err == (
        f"dovetail: package crashing 1.0: the import of its entry point crashing {says}; "
        "DOVETAIL_PLUGINS=-crashing leaves it out\n"
    )
    monkeypatch.setenv("DOVETAIL_PLUGINS", "-crashing")
    probe.check_packages()
