"""compare.py with servers: stand-ins, and real ones on the CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import dovetail
from dovetail.core.checkpoint import FolderCheckpoint
from dovetail.core.compose import compose
from dovetail.core.tokenizer import Tokenizer

from .conftest import BENCHMARKS, TINY, results_page

pytestmark = pytest.mark.nightly

RUN = """
import http.server, json, sys
words = dict(word.partition("=")[::2] for word in sys.argv[1:])
if words["app"] == "serve":
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"version": "7"}')
        def log_message(self, *_):
            pass
    http.server.HTTPServer(("127.0.0.1", int(words["serve.port"])), Handler).serve_forever()
if words["workload"] == "online":
    sys.exit(2)
load = {"rate": 2.0, "summary": {"ttft_ms.median": {"median": 4.0}}, "runs": [{"failed": 3, "requests": 8}]}
with open(words["bench.out"], "w") as file:
    json.dump({"results": [{"loads": [load]}]}, file)
sys.exit(1)
"""
TWIN = """
import json, os, sys
settings = json.loads(sys.argv[1])
run, *options = settings["engine_args"]["run"]
if not run:
    sys.exit(3)
options += ["app=serve", "engine.device=cpu", f"engine.max_len={settings['max_len']}"]
os.execv(sys.executable, [sys.executable, run, *options, f"serve.port={settings['port']}"])
"""


@pytest.fixture
def servers(compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Returns the words of a comparison with the server twin, and --out result.json in tmp_path."""
    (tmp_path / "twin_server.py").write_text(TWIN)
    (tmp_path / "twin_peer.py").touch()
    monkeypatch.setattr(compare, "PEERS", tmp_path)

    def words(workloads: str, *run: str) -> list[str]:
        out = str(tmp_path / "result.json")
        return ["twin", "--workloads", workloads, "--args", json.dumps({"run": run}), "--out", out]

    return words


def test_results_survive_a_server_that_fails(
    compare: ModuleType,
    servers: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Runs with failed requests are shown as such."""
    run = tmp_path / "run.py"
    run.write_text(RUN)
    monkeypatch.setattr(compare.served, "RUN", (sys.executable, str(run)))
    assert compare.main([*servers("poisson", str(run)), "--", *TINY]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["served"][0]["failed"] == {"dovetail": 3, "twin": 3}
    assert [about["version"] for about in result["servers"].values()] == ["7", "7"]
    assert "| poisson, 2 (8 requests; 3 of dovetail failed; 3 of twin failed) |" in capsys.readouterr().out
    with pytest.raises(compare.served.ServerError, match="workload=online against dovetail's server failed"):
        compare.main([*servers("poisson,online", str(run)), "--", *TINY])
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result["servers"]["dovetail"]["loads"]) == {"poisson"} and "twin" not in result["servers"]
    with pytest.raises(compare.served.ServerError, match="twin's server ended with exit code 3"):
        compare.main([*servers("poisson", ""), "--", *TINY])


def test_servers_under_load(
    compare: ModuleType,
    servers: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real servers; the peer is ours under another name. The docs show the result."""
    sizes = {"rates": [20, 40], "seconds": 0.1, "prompt_tokens": 6, "output_tokens": 5}
    words = servers("poisson", str(BENCHMARKS.parent / "run.py"))
    words += [word for name, size in sizes.items() for word in ("--set", f"poisson:workload.{name}={size}")]
    words += ["--env", "HF_TOKEN=s3cr3t words", "--env", "SAMPLER=0"]
    # The client's own options do not disturb the server.
    words += ["--", *TINY, "workload.output_tokens=7", "bench.warmup=2"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    assert compare.main(words) == 0
    printed, text = capsys.readouterr().out, (tmp_path / "result.json").read_text()
    result = json.loads(text)
    assert [row["rate"] for row in result["served"]] == [20.0, 40.0] and not result["comparisons"]
    for row in result["served"]:
        assert f"| poisson, {row['rate']:g} ({row['requests']} requests) |" in printed
        for name in compare.served.FIGURES:
            assert row["ratio"][name] == pytest.approx(row["dovetail"][name] / row["twin"][name], abs=1e-3)
    assert "--env HF_TOKEN=... --env SAMPLER=0" in result["command"] and "s3cr3t" not in text
    assert set(result["servers"]) == {"dovetail", "twin"}
    ours, twin = result["servers"].values()
    assert ours["version"] == twin["version"] == dovetail.__version__ and ours["startup_s"] > 0
    assert "app=serve" in ours["command"] and "twin_server.py" in twin["command"][1]
    (found,) = twin["loads"]["poisson"]["results"]
    assert all(run["failed"] == 0 for load in found["loads"] for run in load["runs"])
    started, table = results_page(result, monkeypatch)
    assert started.startswith("servers of dovetail (") and "| `poisson` at 20/s |" in table


def test_shapes_alone_are_served_with_words(compare: ModuleType, tmp_path: Path) -> None:
    composition = compose(["+preset=h200_fp8_tp1", "model=llama3_8b"], app="bench")
    compare.shared_settings(composition, "vllm", tmp_path)
    program, *words = compare.served.dovetail_server(composition, tmp_path).command(8123)
    assert program == sys.executable and words[:2] == ["-m", "dovetail"]
    served = compose(words[2:])
    model = served.part("model")
    assert served.app == "serve" and served.part("quant").name == "fp8"
    assert (model.name, model.config.path, model.config.load) == ("llama", str(tmp_path), "dummy")
    spec = model.target().spec(model.config)
    assert (spec.vocab, spec.layers) == (128256, 32)
    tokenizer = Tokenizer(FolderCheckpoint(tmp_path))
    assert tokenizer.decode([5, 128255]) == " w5 w128255"
    assert tokenizer.decode(tokenizer.encode('{"ä": 1}')) == '{"ä": 1}', "JSON Schemas need every byte"
