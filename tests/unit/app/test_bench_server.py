"""The app `bench` on a server that streams."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from dovetail.core.compose.cli import main
from dovetail.core.engine.engine import Engine
from dovetail.core.interfaces import RequestOptions, TimedRequest
from dovetail.plugins.app.bench.http import Address, Answer, HttpError
from dovetail.plugins.app.bench.metrics import Timeline
from dovetail.plugins.app.bench.server import StreamedAnswer

from .test_bench import CPU, SMALL, bench


class FakeServer:
    """Streams `max_tokens` tokens, two per piece, and records its requests."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.takes_ids, self.obeys = True, True
        app = FastAPI()
        app.get("/v1/models")(self.models)
        app.post("/v1/completions", response_model=None)(self.complete)
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    async def models(self) -> dict[str, Any]:
        return {"data": [{"id": "fake"}]}

    async def complete(self, request: Request) -> StreamingResponse | JSONResponse:
        body = await request.json()
        self.asked.append(body)
        if not self.takes_ids and not isinstance(body["prompt"], str):
            return JSONResponse({"error": "prompt must be a string"}, 422)
        return StreamingResponse(self.pieces(body["max_tokens"]), media_type="text/event-stream")

    async def pieces(self, tokens: int) -> AsyncIterator[str]:
        yield ": a comment keeps the connection alive\n\n"
        tokens -= not self.obeys
        for _ in range(0, tokens, 2):
            await asyncio.sleep(0.02)
            yield f"data: {json.dumps({'choices': [{'text': 'ab', 'finish_reason': None}]})}\n\n"
        yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': tokens}})}\n\n"
        yield "data: [DONE]\n\n"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}/v1"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    fake.thread.start()
    while not fake.server.started:
        assert fake.thread.is_alive()
        threading.Event().wait(0.01)
    yield fake
    fake.server.should_exit = True
    fake.thread.join()


@pytest.mark.flaky(reruns=1)  # A piece that arrives late on a busy machine shortens the gap after it.
def test_a_run_on_a_server(server: FakeServer, tmp_path: Path) -> None:
    result = bench(tmp_path, f"bench.url={server.url}", *SMALL)
    assert result["startup"] == {"target": "server", "url": server.url, "model": "fake", "send": "ids"}
    (run,) = result["results"][0]["loads"][0]["runs"]
    assert (run["failed"], run["output_tokens"], run["prompt_tokens"]) == (0, 20, 24)
    assert run["ttft_ms"]["median"] >= 20 and 40 <= run["itl_ms"]["median"] * 2 < 400
    assert run["e2e_ms"]["median"] >= 60
    assert run["client_lag_ms"]["max"] >= 0 and run["client_busy"] > 0 and "steps" not in run
    body = server.asked[-1]
    assert len(body["prompt"]) == 6 and all(0 <= token < 4096 for token in body["prompt"])
    assert {**body, "prompt": None} == {
        "model": "fake",
        "prompt": None,
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    # A warm-up of one request, the run of four, and the run with one token.
    assert [asked["max_tokens"] for asked in server.asked] == [4] + [5] * 4 + [1] * 4
    assert len({tuple(asked["prompt"]) for asked in server.asked}) == 9, "the server never sees a prompt twice"


def test_no_rate_and_no_workload_brings_prompts_of_another(server: FakeServer, tmp_path: Path) -> None:
    """Repeated prompts would be in the server's prefix cache and would lower the TTFT of a load curve."""
    variants = tmp_path / "conf" / "workload"
    variants.mkdir(parents=True)
    for name in ("few", "same"):
        (variants / f"{name}.yaml").write_text(
            "defaults: [poisson, _self_]\nrates: [200, 400]\nat_least: 3\nseconds: 0.01\n"
            "output_tokens: 2\nprompt_tokens: 4\n"
        )
    bench(tmp_path, "-cd", str(tmp_path / "conf"), f"bench.url={server.url}", "bench.workloads=[few,same]")
    prompts = [tuple(asked["prompt"]) for asked in server.asked]
    assert len(prompts) == len(set(prompts)) == 2 * (4 + 5)


def test_prompts_that_a_server_may_have_cached_are_counted(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of a file are already sent in the warm-up."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"prompt_ids": [n, n], "output_tokens": 2}) + "\n" for n in range(4)))
    words = (f"bench.url={server.url}", "workload=trace", f"workload.path={trace}", "bench.runs=2")
    result = bench(tmp_path, *words, "bench.one_token_run=false")
    (load,) = result["results"][0]["loads"]
    assert [run["prompts_sent_before"] for run in load["runs"]] == [1, 4]
    assert "1 of 4 prompts had been sent before" in " ".join(capsys.readouterr().err.split())
    (run,) = bench(tmp_path, f"bench.url={server.url}", *SMALL)["results"][0]["loads"][0]["runs"]
    assert "prompts_sent_before" not in run


def test_requests_name_adapters_as_models(server: FakeServer, tmp_path: Path) -> None:
    """The assignment is reproducible, and the first adapter is far more frequent than the last."""
    few = ("workload.requests=40", "workload.prompt_tokens=2", "workload.output_tokens=2", "bench.one_token_run=false")
    for _ in range(2):
        bench(tmp_path, f"bench.url={server.url}", *few, "bench.adapters=[a,'',c]", "bench.adapter_skew=2")
    models = [asked["model"] for asked in server.asked]
    assert models[:41] == models[41:]
    counts = [models[1:41].count(name) for name in ("a", "fake", "c")]
    assert sum(counts) == 40 and counts[0] > 2 * counts[1] > 2 * counts[2] > 0, counts


def test_options_of_a_request_reach_server_and_engine(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"priority": 1, "user": "ann", "cache_salt": "s", "hints": {"output_tokens": 2.0}}
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"prompt_ids": [1], "output_tokens": 2, "deadline": 90.0} | options))
    words = ("workload=trace", f"workload.path={trace}", "bench.one_token_run=false")
    bench(tmp_path, *words, f"bench.url={server.url}")
    assert server.asked[-1].items() >= (options | {"timeout": 90.0}).items()
    found: list[RequestOptions] = []
    add = Engine.add

    def spy(self: Engine, ids: Any, params: Any, options: RequestOptions) -> Any:
        found.append(options)
        return add(self, ids, params, options)

    monkeypatch.setattr(Engine, "add", spy)
    before = time.perf_counter()
    bench(tmp_path, *words)
    assert found[-1] == RequestOptions(**options, deadline=found[-1].deadline)  # type: ignore[arg-type]
    assert before + 90 < (found[-1].deadline or 0) < time.perf_counter() + 90


def test_a_server_that_takes_only_text(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.takes_ids = False
    assert main([*CPU, *SMALL, f"bench.url={server.url}", "bench.model=mine"]) == 2
    assert "bench.send=text" in capsys.readouterr().err
    result = bench(tmp_path, *SMALL, f"bench.url={server.url}", "bench.send=text", "bench.model=mine")
    assert result["results"][0]["loads"][0]["runs"][0]["failed"] == 0
    assert isinstance(server.asked[-1]["prompt"], str) and server.asked[-1]["model"] == "mine"


def test_a_server_that_stops_early_is_a_failure(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.obeys = False
    assert main([*CPU, *SMALL, f"bench.url={server.url}"]) == 2
    assert "the server ignores ignore_eos" in capsys.readouterr().err


def stream(*pieces: tuple[float, str], wanted: int) -> Timeline:
    answer = StreamedAnswer([(clock, text.encode()) for clock, text in pieces])
    line = Timeline(0.05, 3)
    answer.fill(line, TimedRequest((1, 2, 3), wanted))
    return line


def event(**content: Any) -> str:
    return f"data: {json.dumps(content)}\n\n"


TOKEN = event(choices=[{"text": "é"}])


def usage(tokens: int) -> str:
    return event(choices=[], usage={"completion_tokens": tokens}) + "data: [DONE]\n\n"


def test_tokens_are_shared_out_over_what_came() -> None:
    line = stream((0.1, TOKEN), (0.2, TOKEN), (0.3, TOKEN + usage(8)), wanted=8)
    assert line.times == [0.1, 0.2, 0.3] and sum(line.counts) == 8 and min(line.counts) >= 2
    assert line.ttft == pytest.approx(0.05) and not line.failure


def test_the_last_event_of_some_servers_is_no_token() -> None:
    end = event(choices=[{"text": "", "finish_reason": "length"}])
    line = stream((0.1, TOKEN), (0.2, TOKEN), (0.3, end + usage(2)), wanted=2)
    assert (line.times, line.counts) == ([0.1, 0.2], [1, 1])


def test_an_event_has_come_when_its_last_byte_has_and_those_of_one_moment_are_one_arrival() -> None:
    line = stream((0.1, TOKEN[:9]), (0.2, TOKEN[9:] + TOKEN), (0.3, TOKEN), (0.4, usage(3)), wanted=3)
    assert (line.times, line.counts) == ([0.2, 0.3], [2, 1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TOKEN, "without usage.completion_tokens"),
        (usage(3), "without output"),
        (TOKEN + usage(2), "2 tokens arrived instead of 3"),
        (TOKEN + event(error={"message": "out of memory"}), "out of memory"),
        ("data: {]\n\n", "not a JSON object"),
        ("data: [1]\n\n", "not a JSON object"),
    ],
)
def test_a_stream_that_is_not_whole_fails(text: str, words: str) -> None:
    assert words in stream((0.1, text), wanted=3).failure


# HTTP client.


@contextmanager
def answering(*pieces: bytes) -> Iterator[str]:
    """Run a server that reads a request, answers with the given bytes and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(0.03)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(5)


def ask(url: str) -> Answer:
    return asyncio.run(Address(url, "secret").ask("POST", "/x", b"{}"))


def test_an_answer_is_kept_as_it_came() -> None:
    head = b"HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n"
    with answering(head + b"2\r\nab\r\n1\r\nc\r\n", b"1\r\nd\r\n0\r\n\r\n") as url:
        answer = ask(url)
    (first, second, third), pieces = zip(*answer.pieces, strict=True)
    assert (answer.status, answer.body, pieces) == (201, b"abcd", (b"ab", b"c", b"d"))
    assert first == second and third - second > 0.02


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc",), "closed before the answer was complete"),
        ((b"what?\r\n\r\n",), "not valid HTTP"),
    ],
)
def test_an_incomplete_answer_is_an_error(pieces: tuple[bytes, ...], words: str) -> None:
    with answering(*pieces) as url, pytest.raises(HttpError, match=words):
        ask(url)


def test_an_address_must_be_one() -> None:
    with pytest.raises(ValueError, match="http://HOST"):
        Address("localhost:8000/v1", None)
