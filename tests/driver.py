"""Run command lines and scripts in one process, so that torch is imported once.

`python driver.py jobs.json results.json`: a job has text, cwd, and argv with env, or code; a result has code and out.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from dovetail.core.compose import installed
from dovetail.core.compose.cli import main


def run(job: dict[str, Any]) -> int:
    os.chdir(job["cwd"])
    if "code" in job:
        exec(compile(job["code"], job["text"], "exec"), {"__name__": "__main__"})
        return 0
    os.environ.update(job["env"])
    if job["env"]:
        installed.cache_clear()
    try:
        return main(job["argv"])
    finally:
        for name in job["env"]:
            del os.environ[name]
        if job["env"]:
            installed.cache_clear()


def outcome(job: dict[str, Any]) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = run(job)
        except BaseException:
            out.write(traceback.format_exc())
            code = 1
    return {"code": code, "out": out.getvalue()}


if __name__ == "__main__":
    jobs, results = map(Path, sys.argv[1:])
    results.write_text(json.dumps([outcome(job) for job in json.loads(jobs.read_text())]))
