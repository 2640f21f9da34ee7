"""A long start prints its phase, unless a progress bar shows it."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from dovetail.plugins.app import waiting


def test_a_log_gets_a_line_and_a_terminal_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SECONDS", 0.01)
    log, terminal = io.StringIO(), io.StringIO()
    with (
        waiting.phases_in_lines(Console(file=log)) as told,
        waiting.phases_in_lines(Console(file=terminal, force_terminal=True)) as drawn,
    ):
        for phase in (told, drawn):
            phase("load weights", 0.5)
        deadline = time.monotonic() + 60
        while "s: load weights, 50%" not in log.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "s: load weights, 50%" in log.getvalue() and terminal.getvalue() == ""


def test_a_message_is_one_line_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    text = "started [in] " + "load weights 1.0 s, " * 20
    waiting.line_console().print(text, markup=False)
    assert capfd.readouterr().err == text + "\n"
