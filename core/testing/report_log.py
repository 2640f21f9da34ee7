"""Pytest plugin that appends each outcome to a file of JSON lines: `-p dovetail.core.testing.report_log`. The file
survives a crash of the process, and its last line then names the test that ran."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

FILE = "DOVETAIL_REPORT_LOG"
"""Environment variable with the path of the file."""


def pytest_runtest_logstart(nodeid: str) -> None:
    _append(nodeid, "started")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Set-up and tear-down count only if they end a test.
    if report.when == "call" or report.outcome != "passed":
        _append(report.nodeid, report.outcome, report.duration, _reason(report.longrepr))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome == "failed":
        _append(report.nodeid, "failed", reason=_reason(report.longrepr))


def _reason(found: Any) -> str:
    """Return the message of the exception, or the reason of a skip; "" for a test that passed."""
    if isinstance(found, tuple):
        return str(found[2]).removeprefix("Skipped: ")
    crash = getattr(found, "reprcrash", None)
    return str(crash.message if crash is not None else found or "")


def _append(test: str, outcome: str, seconds: float = 0.0, reason: str = "") -> None:
    line = {"test": test, "outcome": outcome, "seconds": seconds, "reason": reason}
    with open(os.environ[FILE], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
