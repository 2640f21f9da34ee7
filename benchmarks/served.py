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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """How a server is started, and where it will answer."""

    name: str
    command: Sequence[str]
    port: int
    env: dict[str, str]
    """Over our own environment."""


def dovetail_server(composition: Composition, folder: Path) -> Server:
    """Ours. A model of shapes alone is served from `folder`, which has its config.json and gets a tokenizer."""
    model, words = composition.part("model"), list(composition.overrides)
    if model.target().source(model.config).folder is None:
        spec: ModelSpec = model.facts() or model.target().spec(model.config)
        write_tokenizer(folder, spec.vocab)
        words += [f"model={model.name}", f"model.path={folder}", "model.load=dummy", "grammar=none"]
    port = free_port()
    # vLLM refuses nobody.
    options = ("app=serve", f"serve.port={port}", "serve.max_waiting=100000")
    return Server("dovetail", [sys.executable, RUN, *words, *options], port, {})


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
def serving(server: Server) -> Iterator[float]:
    """Seconds until it was ready."""
    began = time.perf_counter()
    process = subprocess.Popen(server.command, env=os.environ | server.env, stdout=STDERR)
    try:
        while not _ready(server.port):
            if process.poll() is not None:
                raise ServerError(f"{server.name}'s server ended with exit code {process.returncode}; see above")
            if time.perf_counter() - began > LATEST:
                raise ServerError(f"{server.name}'s server is not ready after {LATEST:g} s; see above")
            time.sleep(POLL)
        yield time.perf_counter() - began
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def measure(server: Server, workloads: dict[str, list[str]], rounds: int, folder: Path) -> tuple[dict[str, Any], float]:
    """Of one server: workload -> what app=bench wrote; and the seconds of its start. `workloads`: name -> overrides of
    the client."""
    found = {}
    with serving(server) as seconds:
        for name, overrides in workloads.items():
            out = folder / f"{server.name}-{name}.json"
            options = (f"bench.url=http://127.0.0.1:{server.port}/v1", f"bench.runs={rounds}", f"bench.out={out}")
            words = [sys.executable, RUN, *overrides, "app=bench", *options]
            if subprocess.run(words, stdout=STDERR).returncode != 0:
                raise ServerError(f"workload={name} against {server.name}'s server failed; see above")
            found[name] = json.loads(out.read_text(encoding="utf-8"))
    return found, seconds


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
            rows.append(row | {ours: figures[0], peer: figures[1], "ratio": ratios})
    return rows


def markdown(rows: Sequence[dict[str, Any]], ours: str, peer: str) -> str:
    head = ["workload, requests/s", *(f"{title}: {ours} / {peer} (ratio)" for title, _ in FIGURES.values())]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [f"{row['workload']}, {row['rate']:g} ({row['requests']} requests)"]
        cells += [
            f"{row[ours][name]:.4g} / {row[peer][name]:.4g} ({row['ratio'][name]:.2f})" if name in row["ratio"] else "-"
            for name in FIGURES
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
