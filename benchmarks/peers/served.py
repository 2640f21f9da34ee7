"""Workloads whose requests arrive over time, on the servers of Dovetail and a peer, for compare.py.

Each server runs alone. `python run.py app=bench bench.url=...` sends both the same prompts at the same moments.
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

from peers import model_folder
from peers.offline import ratio_table

from dovetail import Composition, DovetailError

RUN = (sys.executable, "-m", "dovetail")
FIGURES = {
    "ttft_ms.median": "first token ms, median",
    "ttft_ms.p99": "p99",
    "tpot_ms.median": "TPOT ms, median",
    "output_tokens_per_s": "output tokens/s",
}
"""Key of a figure in a load's summary -> its heading in a table."""
POLL = 0.1
"""Seconds between two checks whether a server is ready."""
STDERR = 2
"""Stream for the output of subprocesses and for our own progress."""
LATEST = 900.0
"""Seconds within which a server must be ready."""


class ServerError(DovetailError):
    """A server did not start, or requests to it failed."""


@dataclass(frozen=True)
class Server:
    """How a server is started."""

    name: str
    command: Callable[[int], Sequence[str]]
    """Returns the command for a port."""
    env: dict[str, str]
    """Added to our own environment."""


def dovetail_server(composition: Composition, folder: Path) -> Server:
    """Our server. A model of shapes alone is served from `folder`, which has its config.json and tokenizer."""
    words = [word for word in composition.overrides if not _is_the_clients(word)]
    if model_folder.has_shapes_alone(composition):
        words = [*model_folder.loading(composition, words, folder), "grammar=none"]
    # vLLM refuses no request.
    words += ["app=serve", "serve.max_waiting=100000"]
    return Server("dovetail", lambda port: [*RUN, *words, f"serve.port={port}"], {})


def _is_the_clients(word: str) -> bool:
    node = word.lstrip("+~").partition("=")[0].partition(".")[0]
    return node in ("app", "bench", "workload")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def serving(server: Server, port: int) -> Iterator[float]:
    """Run a server. Yields the seconds until it was ready."""
    began = time.perf_counter()
    process = subprocess.Popen(server.command(port), env=os.environ | server.env, stdout=STDERR)
    try:
        while True:
            ready = _get(port, "v1/models") is not None
            if process.poll() is not None:  # also if another server answers on that port
                raise ServerError(f"{server.name}'s server ended with exit code {process.returncode}; see above")
            if ready:
                break
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


def _get(port: int, path: str) -> Any:
    """Return a JSON answer; None if there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as answer:
            return json.load(answer)
    except (urllib.error.URLError, OSError, ValueError):
        return None


def measure(server: Server, workloads: dict[str, list[str]], rounds: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Run a server through the workloads (name -> overrides of the client). Yields the server's record after each; its
    `loads` are workload -> what app=bench wrote."""
    port = free_port()
    loads: dict[str, Any] = {}
    with serving(server, port) as seconds:
        version = _get(port, "version")
        about = {
            "command": list(server.command(port)),
            "version": version.get("version") if isinstance(version, dict) else None,
            "startup_s": round(seconds, 2),
            "loads": loads,
        }
        for name, overrides in workloads.items():
            out = folder / f"{server.name}-{name}.json"
            options = (f"bench.url=http://127.0.0.1:{port}/v1", f"bench.runs={rounds}", f"bench.out={out}")
            # Exit code 1: some requests failed, which the figures show.
            status = subprocess.run([*RUN, *overrides, "app=bench", *options], stdout=STDERR).returncode
            if status not in (0, 1) or not out.exists():
                raise ServerError(f"workload={name} against {server.name}'s server failed; see above")
            loads[name] = json.loads(out.read_text(encoding="utf-8"))
            yield about


def compared(measured: dict[str, dict[str, Any]], ours: str, peer: str) -> list[dict[str, Any]]:
    """One row for each rate of each workload. `measured`: engine -> workload -> what app=bench wrote."""
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
    return ratio_table("workload, requests/s", FIGURES, named, (ours, peer))
