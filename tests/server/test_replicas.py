"""A server with two replicas: distribution of requests, and the effect of a replica's death on the other."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from .conftest import children, until

pytestmark = pytest.mark.nightly

LONG = dict(model="tiny", max_tokens=2000, stream=True, extra_body={"ignore_eos": True})
SHORT = dict(model="tiny", max_tokens=4, temperature=0.0)


def health(server) -> list[dict[str, object]]:
    return httpx.get(f"{server.url}/health").json()["replicas"]


@pytest.fixture(scope="module")
def replicas(start_module):
    server = start_module(
        *("engine.dp=2", "engine.max_seqs=4", "serve.max_waiting=2", "router.sample_tokens=64", "serve.grace=5")
    )
    return server.wait_ready()


def test_work_is_spread_and_counted_by_replica(replicas, server):
    """Outputs equal those of one engine, each prefix goes to one replica, and counters have a replica label."""
    prompts = [f"def function_{i}(x):\n    return x + {i}\n\n\ndef test_{i}():\n" * 6 for i in range(4)]

    def ask(where, prompt: str):
        return where.client().completions.create(prompt=prompt, **SHORT)

    with ThreadPoolExecutor(4) as pool:
        ours = list(pool.map(lambda prompt: ask(replicas, prompt), prompts))
    expected = [ask(server, prompt).choices[0].text for prompt in prompts]
    assert [answer.choices[0].text for answer in ours] == expected
    found = replicas.stats()
    assert found["pages_owned"] == 0 and len(found["replicas"]) == 2
    assert all(one["prefix_queries"] for one in found["replicas"]), found
    hits = [one["prefix_hits"] for one in found["replicas"]]
    for prompt in prompts:
        ask(replicas, prompt)
    again = replicas.stats()["replicas"]
    gained = sum(one["prefix_hits"] for one in again) - sum(hits)
    asked = sum(answer.usage.prompt_tokens for answer in ours)
    assert gained > 0.7 * asked, "each prompt was routed to the replica that has it cached"

    def counted() -> dict[str, float]:
        families = text_string_to_metric_families(httpx.get(f"{replicas.url}/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return {s.labels["replica"]: s.value for s in samples if s.name == "dovetail_prefix_cache_queries_total"}

    expected_counts = {str(i): float(one["prefix_queries"]) for i, one in enumerate(again)}
    until(lambda: counted() == expected_counts)


def test_the_queue_is_shared_and_a_disconnect_aborts_on_the_replica(replicas):
    """2 x 4 requests run and 2 wait; the eleventh gets 429. After all clients disconnect, no replica owns a page."""
    client = replicas.client()
    with ThreadPoolExecutor(10) as pool:
        streams = [pool.submit(client.completions.create, prompt=f"x{i} = 1\n", **LONG) for i in range(10)]
        until(lambda: [one["samples"] for one in health(replicas)] == [5, 5])
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(prompt="x", **SHORT)
        assert refused.value.response.headers["retry-after"]
        with pytest.raises(openai.BadRequestError, match="11 samples"):
            client.completions.create(prompt="x", n=11, **SHORT)
        # An answer begins with its first token, so waiting requests begin after others have ended.
        for stream in as_completed(streams):
            stream.result().close()
    until(lambda: [one["samples"] for one in health(replicas)] == [0, 0])
    assert [one["pages_owned"] for one in replicas.stats()["replicas"]] == [0, 0]


def test_one_replica_dies_and_the_other_goes_on(replicas):
    client, ended = replicas.client(), {}
    pids = children(replicas.process.pid, "engine_main:main")
    assert len(pids) == 2

    def follow(i: int) -> None:
        try:
            ended[i] = sum(1 for _ in client.completions.create(prompt=f"x{i} = 1\n", **{**LONG, "max_tokens": 300}))
        except openai.APIError as error:
            ended[i] = str(error)

    threads = [threading.Thread(target=follow, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: [one["running"] for one in health(replicas)] == [2, 2])
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: sorted(one["state"] for one in health(replicas)) == ["ready", "starting"])
    assert httpx.get(f"{replicas.url}/ready").status_code == 200
    assert [client.completions.create(prompt="y = 1\n", **SHORT).usage.completion_tokens for _ in range(3)] == [4] * 3
    for thread in threads:
        thread.join(60)
    assert sorted(map(type, ended.values()), key=str) == [int, int, str, str], ended
    errors = [text for text in ended.values() if isinstance(text, str)]
    assert all(re.search(r"replica [01] was killed by SIGKILL", text) for text in errors)
    until(lambda: [one["state"] for one in health(replicas)] == ["ready", "ready"])
    assert sum("SIGKILL" in line and "started again" in line for line in replicas.log) == 1
    restarts = re.findall(r"engine_restarts_total\{.*\} (\S+)", httpx.get(f"{replicas.url}/metrics").text)
    assert sorted(map(float, restarts)) == [0, 1]
    assert [one["pages_owned"] for one in replicas.stats()["replicas"]] == [0, 0]


def test_shutdown_leaves_no_process_behind(replicas):
    pids = children(replicas.process.pid)
    assert len(pids) == 3, "two engines, and the process of the chat template"
    assert replicas.stop() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.nightly
def test_a_replica_that_cannot_start_ends_the_server_with_its_reason(start):
    """The server ends even though the other replica could start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = start("engine.dp=2", "observer=[prometheus]", f"observer.prometheus.port={port}")
    assert server.wait() == 2
    assert re.search(rf"dovetail: replica [01] failed: .*port={port}", server.log[-1]), server.log
