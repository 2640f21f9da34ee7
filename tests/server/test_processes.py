"""serve.processes=2: clients see one server, regardless of which process answers or dies."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from .conftest import children, ended, until

pytestmark = pytest.mark.nightly

SECONDS = 60.0


def front_ends(server: Any) -> list[int]:
    return children(server.process.pid, "front_end_process:main")


class Connection:
    """A connection that is kept open, so one process answers all its requests."""

    def __init__(self, server: Any) -> None:
        self._http = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=SECONDS)
        self.get("/version")
        self.pid = _owner(self._http.sock.getsockname()[1], front_ends(server))

    def get(self, path: str) -> str:
        self._http.request("GET", path)
        return self._http.getresponse().read().decode()

    def send(self, prompt: str = "x = 1\n", tokens: int = 2000, **more: Any) -> None:
        """Send a request without waiting for its answer."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True} | more
        self._http.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})

    def complete(self, prompt: str = "x = 1\n", tokens: int = 8, **more: Any) -> tuple[int, dict[str, Any]]:
        self.send(prompt, tokens, **more)
        answer = self._http.getresponse()
        return answer.status, json.loads(answer.read())

    def events(self) -> list[dict[str, Any]]:
        """Return the events of a stream up to its end. An error before the first token is a plain response."""
        lines = self._http.getresponse().read().decode().splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith(("data: {", "{"))]

    def close(self) -> None:
        self._http.close()


def _owner(port: int, pids: list[int]) -> int:
    """Return the process that holds the other end of a connection from that port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows if int(row[2].rpartition(":")[2], 16) == port}
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.readlink(file) in inodes:
                    return pid
            except FileNotFoundError:
                continue
    raise AssertionError(f"no process has the connection from port {port}")


def one_to_each(server: Any) -> list[Connection]:
    """Open one connection to each process. The kernel chooses the process by the client's port."""
    found: dict[int, Connection] = {}
    deadline = time.monotonic() + SECONDS
    while len(found) < 2:
        assert time.monotonic() < deadline
        connection = Connection(server)
        found.setdefault(connection.pid, connection)
    return list(found.values())


def counted(connection: Connection) -> Counter[str]:
    """Return metrics, summed over labels."""
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(connection.get("/metrics")):
        for sample in family.samples:
            if sample.name.startswith("dovetail_") and not sample.name.endswith("_created"):
                name = sample.name.removeprefix("dovetail_")
                sums[name] += sample.value
    return sums


@pytest.fixture(scope="module")
def two(start_module: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    files = tmp_path_factory.mktemp("files")
    words = ("serve.processes=2", "engine.max_seqs=8", "serve.max_waiting=2", "serve.front_end_timeout=10")
    server = start_module(*words, TMPDIR=str(files))
    server.wait_log("ready:")
    server.files = files
    return server


def test_both_processes_answer_and_every_scrape_covers_both(two):
    first, second = one_to_each(two)
    for pid in (two.process.pid, first.pid, second.pid):
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text(), "memory and start-up of every process"
    before = counted(first)
    prompts = [f"def f{i}(x):\n" for i in range(4)]
    for connection in (first, second):
        assert connection.complete("def f0(x):\n", 24)[0] == 200
    expected = {prompt: first.complete(prompt, 24)[1]["choices"][0]["text"] for prompt in prompts}

    def stream(connection: Connection) -> list[str]:
        ids = []
        for prompt in prompts:
            connection.send(prompt, 24, stream=True)
            events = connection.events()
            assert "".join(event["choices"][0]["text"] for event in events) == expected[prompt]
            ids.append(events[0]["id"])
        return ids

    with ThreadPoolExecutor(2) as pool:
        ids = {id for found in pool.map(stream, (first, second)) for id in found}
    assert len(ids) == 8
    assert second.complete(model="other")[0] == 404
    after = counted(first)
    again = counted(second)
    assert after["requests_finished_total"] == before["requests_finished_total"] + 14
    assert after["request_errors_total"] == before["request_errors_total"] + 1
    for name in ("requests_finished_total", "request_errors_total", "time_to_first_token_seconds_count"):
        assert again[name] == after[name], name
    assert after["request_generation_tokens_sum"] == before["request_generation_tokens_sum"] + 14 * 24
    assert 0 < after["inter_token_latency_seconds_count"] <= 14 * 23
    until(lambda: counted(second)["generation_tokens_total"] == before["generation_tokens_total"] + 14 * 24)
    for connection in (first, second):
        assert json.loads(connection.get("/stats"))["output_tokens"] >= 14 * 24
        connection.close()


def test_the_queue_is_shared_and_a_disconnect_aborts(two):
    asking = one_to_each(two)
    running = [Connection(two) for _ in range(10)]
    for connection in running:
        connection.send(stream=True)
    until(lambda: json.loads(asking[0].get("/stats"))["samples"] == 10)
    for connection in asking:
        status, answer = connection.complete()
        assert status == 429 and "10 samples are running or waiting" in answer["error"]["message"]
    for connection in running:
        connection.close()
    until(lambda: json.loads(asking[1].get("/stats"))["samples"] == 0)
    assert two.stats()["pages_owned"] == 0


def test_a_dead_front_end_fails_its_requests_and_a_dead_engine_fails_all(two):
    first, second = one_to_each(two)
    before = counted(first)
    for connection in (first, second):
        connection.send(tokens=300, stream=True)
    until(lambda: two.stats()["running"] == 2)
    os.kill(first.pid, signal.SIGKILL)
    assert sum(len(event["choices"][0]["text"]) > 0 for event in second.events()) > 1
    with pytest.raises((http.client.HTTPException, OSError)):
        first.events()
    two.wait_log(r"front-end \d was killed by SIGKILL.*; it is started again")
    found = two.stats()
    assert found["running"] == found["pages_owned"] == 0
    first.close()
    until(lambda: len(front_ends(two)) == 2)
    third, _ = one_to_each(two)
    until(lambda: '"ready"' in third.get("/ready"))
    assert all(value >= before[name] for name, value in counted(third).items() if name.endswith("_total"))

    # The engine dies: the requests of both processes fail, and it restarts for both.
    alive = one_to_each(two)
    for connection in alive:
        connection.send(stream=True)
    until(lambda: two.stats()["running"] == 2)
    os.kill(children(two.process.pid, "engine_main:main")[0], signal.SIGKILL)
    for connection in alive:
        assert "the engine was killed by SIGKILL" in connection.events()[-1]["error"]["message"]
        assert connection.complete()[0] == 503
    until(lambda: all('"ready"' in connection.get("/ready") for connection in alive))
    assert all(connection.complete()[0] == 200 for connection in alive)
    assert sum("SIGKILL" in line for line in two.log) == 2, two.log


def test_a_front_end_that_hangs_is_replaced_while_the_other_goes_on(two):
    first, second = one_to_each(two)
    first.send(stream=True)
    until(lambda: json.loads(second.get("/stats"))["running"] == 1)
    os.kill(first.pid, signal.SIGSTOP)
    assert second.complete()[0] == 200
    two.wait_log(r"front-end \d hangs: its event loop has not turned for 10 s, so it was killed; it is started again")
    with pytest.raises((http.client.HTTPException, OSError)):
        first.events()
    until(lambda: json.loads(second.get("/stats"))["running"] == 0)
    until(lambda: len(front_ends(two)) == 2)
    third, fourth = one_to_each(two)
    assert second.pid in (third.pid, fourth.pid)
    until(lambda: all('"ready"' in connection.get("/ready") for connection in (third, fourth)))
    assert two.stats()["pages_owned"] == 0
    assert sum("hangs" in line for line in two.log) == 1, two.log
    for connection in (second, third, fourth):
        connection.close()


def test_shutdown_finishes_running_requests_and_leaves_nothing_behind(two):
    connections = one_to_each(two)
    for connection in connections:
        connection.send(tokens=300, stream=True)
    until(lambda: two.stats()["running"] == 2)
    pids = children(two.process.pid)
    assert len(pids) == 3
    pids += [template for pid in pids for template in children(pid, "chat_template:main")]
    assert two.stop() == 0, two.log
    for connection in connections:
        assert connection.events()[-1]["choices"][0]["finish_reason"] == "length"
    assert all(ended(pid) for pid in pids) and not list(two.files.iterdir())


def test_without_the_supervisor_all_processes_end(start, tmp_path):
    server = start("serve.processes=2", TMPDIR=str(tmp_path))
    pids = children(server.process.pid)
    assert len(pids) == 3
    pids += [template for pid in pids for template in children(pid, "chat_template:main")]
    server.process.kill()
    until(lambda: all(ended(pid) for pid in pids))
    assert not list(tmp_path.iterdir())
