"""Servers beside each other, for compare.py: workloads whose requests arrive over time, from one client.

Each server runs alone, and `python run.py app=bench bench.url=...` measures it: the same prompts at the same moments.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offline import ratio_table

from dovetail import Composition, DovetailError
from dovetail.core.interfaces import ModelSpec

RUN = str(Path(__file__).parents[1] / "run.py")
FIGURES = {
    "ttft_ms.median": ("first token ms, median", False),
    "ttft_ms.p99": ("p99", False),
    "tpot_ms.median": ("TPOT ms, median", False),
    "output_tokens_per_s": ("output tokens/s", True),
}
"""Figure of a load's summary -> what it is called, and whether more is better."""
POLL = 0.1
"""Seconds between two questions whether a server is ready."""
STDERR = 2
"""Where what others print goes, beside our own progress."""
LATEST = 900.0
"""Seconds that a server may take to be."""


class ServerError(DovetailError):
    """A server did not start, or requests to it failed."""


@dataclass(frozen=True)
class Server:
    """How a server is started."""

    name: str
    command: Callable[[int], Sequence[str]]
    """Of the port on which it is to answer."""
    env: dict[str, str]
    """Over our own environment."""


def dovetail_server(composition: Composition, folder: Path) -> Server:
    """Ours. A model of shapes alone is served from `folder`, which has its config.json and gets a tokenizer."""
    model = composition.part("model")
    words = [word for word in composition.overrides if not _of_the_client(word)]
    if model.target().source(model.config).folder is None:
        spec: ModelSpec = model.facts() or model.target().spec(model.config)
        write_tokenizer(folder, spec.vocab)
        words += [f"model={model.name}", f"model.path={folder}", "model.load=dummy", "grammar=none"]
    # vLLM refuses nobody.
    words += ["app=serve", "serve.max_waiting=100000"]
    return Server("dovetail", lambda port: [sys.executable, RUN, *words, f"serve.port={port}"], {})


def _of_the_client(word: str) -> bool:
    node = word.lstrip("+~").partition("=")[0].partition(".")[0]
    return node in ("app", "bench", "workload")


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Token i is the word "wi": outputs of random weights must become some text, here and there."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w0", "eos_token": "w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def serving(server: Server, port: int) -> Iterator[float]:
    """Seconds until it was ready."""
    began = time.perf_counter()
    process = subprocess.Popen(server.command(port), env=os.environ | server.env, stdout=STDERR)
    try:
        while not _ready(port):
            _check(server, process)
            if time.perf_counter() - began > LATEST:
                raise ServerError(f"{server.name}'s server is not ready after {LATEST:g} s; see above")
            time.sleep(POLL)
        _check(server, process)  # Or somebody else answers on that port.
        yield time.perf_counter() - began
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _check(server: Server, process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        raise ServerError(f"{server.name}'s server ended with exit code {process.returncode}; see above")


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _version(port: int) -> str | None:
    """What it says that it is; None = nothing."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/version", timeout=5) as answer:
            return str(json.load(answer)["version"])
    except (urllib.error.URLError, OSError, ValueError, LookupError, TypeError):
        return None


def measure(
    server: Server, workloads: dict[str, list[str]], rounds: int, folder: Path, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """What is to be said of one server, `loads` among it: workload -> what app=bench wrote. `workloads`: name ->
    overrides of the client. `save` is told after each, so that nothing measured is lost."""
    port = free_port()
    loads: dict[str, Any] = {}
    with serving(server, port) as seconds:
        about = {
            "command": list(server.command(port)),
            "version": _version(port),
            "startup_s": round(seconds, 2),
            "loads": loads,
        }
        for name, overrides in workloads.items():
            out = folder / f"{server.name}-{name}.json"
            options = (f"bench.url=http://127.0.0.1:{port}/v1", f"bench.runs={rounds}", f"bench.out={out}")
            # 1: some requests failed, which the figures say.
            status = subprocess.run([sys.executable, RUN, *overrides, "app=bench", *options], stdout=STDERR).returncode
            if status not in (0, 1) or not out.exists():
                raise ServerError(f"workload={name} against {server.name}'s server failed; see above")
            loads[name] = json.loads(out.read_text(encoding="utf-8"))
            save(about)
    return about


def compared(measured: dict[str, dict[str, Any]], ours: str, peer: str) -> list[dict[str, Any]]:
    """A row for each rate of each workload. `measured`: engine -> workload -> what app=bench wrote."""
    rows = []
    for workload, result in measured[ours].items():
        loads = zip(result["results"][0]["loads"], measured[peer][workload]["results"][0]["loads"], strict=True)
        for mine, theirs in loads:
            figures = [
                {figure: load["summary"][figure]["median"] for figure in FIGURES if figure in load["summary"]}
                for load in (mine, theirs)
            ]
            ratios = {name: round(figures[0][name] / value, 4) for name, value in figures[1].items() if value}
            row = {"workload": workload, "rate": mine["rate"], "requests": mine["runs"][0]["requests"]}
            failed = [sum(run["failed"] for run in load["runs"]) for load in (mine, theirs)]
            row |= {"failed": {ours: failed[0], peer: failed[1]}} if any(failed) else {}
            rows.append(row | {ours: figures[0], peer: figures[1], "ratio": ratios})
    return rows


def markdown(rows: Sequence[dict[str, Any]], ours: str, peer: str) -> str:
    named = {}
    for row in rows:
        failed = "".join(f"; {count} of {name} failed" for name, count in row.get("failed", {}).items() if count)
        named[f"{row['workload']}, {row['rate']:g} ({row['requests']} requests{failed})"] = row
    return ratio_table("workload, requests/s", FIGURES, named, ours, peer)
