"""Fuzzing with the server's OpenAPI schema: neither valid nor invalid requests cause an internal error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)


def test_no_request_is_a_defect(start, tmp_path):
    # Short sequences: long answers would only take time.
    server = start("engine.max_len=32", "serve.timeout=10").wait_ready()
    words = ["run", f"{server.url}/openapi.json", "--phases=fuzzing", f"--checks={','.join(CHECKS)}", "--no-color"]
    words += ["--max-examples=8", "--generation-deterministic", "--no-shrink", "--request-timeout=20", "--workers=2"]
    schemathesis = Path(sys.executable).with_name("schemathesis")
    argv = [schemathesis, *words]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout
    assert server.stats()["pages_owned"] == 0
    assert server.stop() == 0
    assert not any("Traceback" in line for line in server.log), "".join(server.log)
