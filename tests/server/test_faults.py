"""Deaths of engines and ranks, and shutdown of the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from .conftest import children, ended

ROOT = Path(__file__).parents[2]
LONG = dict(model="tiny", prompt="x = 1\n", max_tokens=2000, stream=True, extra_body={"ignore_eos": True})
SHORT = dict(model="tiny", prompt="x = 1\n", max_tokens=4)


@pytest.mark.nightly
def test_a_dead_rank_fails_its_requests_and_the_engine_restarts_then_it_stops_in_order(start):
    server = start("executor=multiproc", "engine.tp=2", "serve.grace=3").wait_ready()
    client, engine = server.client(), server.engine_pid()
    (rank,) = children(engine)
    with pytest.raises(openai.APIError, match="rank 1 was killed by SIGKILL"):
        for number, _ in enumerate(client.completions.create(**LONG)):
            if number == 3:
                os.kill(rank, signal.SIGKILL)
    with pytest.raises(openai.InternalServerError) as refused:
        client.completions.create(**SHORT)
    assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"]
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert sum("rank 1 was killed" in line and "started again" in line for line in server.log) == 1
    server.wait_ready()
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'dovetail_requests_finished_total{model_name="tiny",outcome="error"} 1.0' in metrics
    assert 'dovetail_request_errors_total{model_name="tiny",status="500"} 1.0' in metrics
    assert server.engine_pid() != engine and not Path(f"/proc/{engine}").exists()
    assert client.completions.create(**SHORT).choices[0].text
    assert server.stats()["pages_owned"] == 0

    # Shutdown: requests that can finish in time do, others get an error, new ones are refused.
    finished: dict[str, object] = {}

    def follow(name: str, tokens: int) -> None:
        try:
            finished[name] = sum(1 for _ in client.completions.create(**{**LONG, "max_tokens": tokens}))
        except openai.APIError as error:
            finished[name] = str(error)

    threads = [threading.Thread(target=follow, args=job) for job in (("short", 8), ("long", 2000))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while httpx.get(f"{server.url}/stats").json()["running"] < 2 and threads[0].is_alive():
        assert time.monotonic() < deadline
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.4)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url}/ready")
    assert server.wait() == 0
    assert time.monotonic() - began < 30
    for thread in threads:
        thread.join(5)
    assert finished["short"] == 8 and "the server stops" in str(finished["long"]), finished


def test_ctrl_c_ends_what_runs(start):
    server = start().wait_ready()
    stream = iter(server.client().completions.create(**LONG))
    next(stream)
    began = time.monotonic()
    assert server.stop(signal.SIGINT) == 0
    assert time.monotonic() - began < 5
    with pytest.raises(openai.APIError, match="the server stops"):
        list(stream)
    assert any("samples are cut off" in line for line in server.log), server.log


@pytest.mark.nightly
def test_exit_on_failure(start):
    server = start("serve.on_engine_failure=exit").wait_ready()
    with pytest.raises(openai.APIError, match="SIGKILL"):
        for _ in server.client().completions.create(**LONG):
            os.kill(server.engine_pid(), signal.SIGKILL)
    assert server.wait() == 1
    assert sum("SIGKILL" in line for line in server.log) == 1, server.log


@pytest.mark.nightly
def test_an_engine_that_hangs_is_killed(start):
    """One rank is suspended: the others wait for it, and none of them dies."""
    server = start("executor=multiproc", "engine.tp=2", "serve.engine_timeout=3", "serve.on_engine_failure=exit")
    server.wait_ready()
    (rank,) = children(server.engine_pid())
    with pytest.raises(openai.APIError, match="the engine hangs: it had work and sent nothing for 3 s"):
        for number, _ in enumerate(server.client().completions.create(**LONG)):
            if number == 3:
                os.kill(rank, signal.SIGSTOP)
    assert server.wait() == 1 and ended(rank)
    log = "".join(server.log)
    assert log.count("the engine hangs") == 1
    assert "all_reduce" in log, "the log shows where it hung"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.path=/nowhere", "/nowhere"),
        pytest.param("serve.host=203.0.113.1", "serve.host=203.0.113.1", marks=pytest.mark.nightly),
        pytest.param("serve.chat_template=/nowhere.jinja", "serve.chat_template", marks=pytest.mark.nightly),
        pytest.param("attention=triton", "triton", marks=pytest.mark.nightly),
    ],
)
def test_a_failed_start_reports_the_reason(override, words):
    command = ["run.py", "app=serve", "+preset=tiny_cpu", "serve.port=0", *override.split()]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr.splitlines()[-1] or words in done.stderr.partition("dovetail: ")[2]
    assert "Traceback" not in done.stderr
