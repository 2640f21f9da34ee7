"""Hostile requests: each gets its own error, and other requests are not affected."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time

import httpx
import pytest

CHAT = '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, '


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


def post(server, path: str, body: str | bytes) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", content=body, headers={"content-type": "application/json"}, timeout=60)


def deep_arguments(depth: int) -> str:
    """JSON inside a JSON string: the parser of the body does not see its depth."""
    call = {"id": "a", "function": {"name": "f", "arguments": nested(depth)}}
    return json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}], "max_tokens": 1})


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        *(("/v1/responses", '{"input": "x", "metadata": ' + nested(n) + "}", 400, "") for n in (300, 900)),
        ("/v1/responses", '{"input": "x", "metadata": ' + nested(100_000) + "}", 400, "nested too deeply"),
        ("/v1/completions", b'{"prompt": "\xff"}', 400, "not valid UTF-8"),
        ("/v1/completions", gzip.compress(b'{"prompt": "x"}', mtime=0), 400, "not valid UTF-8"),
        *(
            ("/v1/chat/completions", CHAT + '"chat_template_kwargs": ' + nested(n) + "}", 400, "")
            for n in (900, 100_000)
        ),
        ("/v1/chat/completions", deep_arguments(100_000), 200, ""),
        ("/v1/responses", '{"input": "x", "metadata": {"a": "\\ud800"}}', 400, "metadata"),
        ("/v1/completions", '{"prompt": "\\ud800"}', 400, "prompt"),
        ("/v1/completions", '{"prompt": "x", "\\ud800": 1}', 400, ""),
        ("/v1/chat/completions", CHAT + '"chat_template_kwargs": {"self": 1}}', 400, "self cannot be set"),
        ("/v1/chat/completions", CHAT + '"chat_template_kwargs": {"conversations": 1}}', 400, "cannot be set"),
        ("/v1/completions", json.dumps({"prompt": "x", "stop": ["a" * 2000]}), 400, "stop"),
        ("/v1/completions", json.dumps({"prompt": "x", "hints": {str(i): 1 for i in range(65)}}), 400, "hints"),
        ("/v1/completions", '{"prompt": "x", "seed": ' + "9" * 5000 + "}", 400, ""),
        ("/v1/completions", '{"prompt": "x", "temperature": 1e999}', 400, "temperature"),
        ("/v1/completions", '{"prompt": "x", "regex": "' + "(" * 20_000 + '"}', 400, '"param":"regex"'),
        ("/v1/completions", json.dumps({"prompt": "x", "grammar": "start: " + "(" * 20_000}), 400, '"param":"grammar"'),
        (
            "/v1/chat/completions",
            CHAT
            + '"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "file:///etc/passwd"}}}}',
            400,
            '"param":"response_format"',
        ),
        ("/v1/completions", json.dumps({"prompt": "x", "choice": [""]}), 400, '"param":"choice"'),
        ("/v1/completions", '{"prompt": "x", "max_tokens": "5"}', 400, '"param":"max_tokens"'),
        ("/v1/completions", json.dumps({"prompt": ["x"] * 20_000}), 400, "prompt: has 20000 items; the limit is 16384"),
        ("/v1/completions", json.dumps({"prompt": ["x"] * 3000}), 400, "3000 prompts, but at most 2048 are allowed"),
        (
            "/v1/chat/completions",
            json.dumps({"messages": [{"role": "user", "content": "x"}] * 5000}),
            400,
            "the prompt has at least 5000 tokens",
        ),
        ("/v1/responses", json.dumps({"input": [{"role": "user", "content": "x"}] * 5000}), 400, '"param":"input"'),
        ("/v1/responses", '{"input": [{"role": "user"}]}', 400, '"param":"input"'),
        ("/v1/completions", b"\xff\xfe", 400, ""),
        ("/v1/completions", b"", 400, ""),
    ],
)
def test_what_is_refused_is_refused_in_a_few_words(server, path, body, status, said):
    answer = post(server, path, body)
    assert answer.status_code == status and said in answer.text
    assert status == 200 or len(answer.json()["error"]["message"]) < 1000


def test_a_prompt_of_megabytes_does_not_delay_others(server):
    worst, stop = [0.0], threading.Event()

    def look() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not stop.is_set():
                began = time.monotonic()
                client.get("/health")
                worst[0] = max(worst[0], time.monotonic() - began)

    thread = threading.Thread(target=look)
    thread.start()
    began = time.monotonic()
    answer = post(server, "/tokenize", json.dumps({"prompt": "a" * 900_000}))
    taken = time.monotonic() - began
    stop.set()
    thread.join()
    assert answer.status_code == 200 and answer.json()["count"] > 10_000
    assert worst[0] < max(2, taken / 2), (worst, taken)
    began = time.monotonic()
    refused = post(server, "/v1/completions", json.dumps({"prompt": "a" * 900_000}))
    assert refused.json()["error"]["code"] == "context_length_exceeded" and time.monotonic() - began < max(5, taken)


def raw(server, *pieces: bytes, wait: float = 0.0) -> bytes:
    """Return everything received until the server closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(wait)
        found = b""
        try:
            while data := sock.recv(65536):
                found += data
        except ConnectionResetError:
            pass
        return found


def test_a_head_without_an_end(server):
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x-a: " + b"a" * 200_000
    found = raw(server, head)
    assert found.startswith(b"HTTP/1.1 431") and b"longer than 65536 bytes" in found


@pytest.fixture(scope="module")
def impatient(start_module, tmp_path_factory):
    """A server with a chat template that loops, and short timeouts."""
    template = tmp_path_factory.mktemp("template") / "loop.jinja"
    template.write_text("".join("{% for " + name + " in range(99999) %}" for name in "abc") + "{% endfor %}" * 3)
    timeouts = ("serve.template_timeout=1", "serve.grace=1", "serve.receive_timeout=1.5")
    return start_module(f"serve.chat_template={template}", *timeouts).wait_ready()


def test_a_slow_client_is_not_waited_for(impatient):
    server = impatient
    began = time.monotonic()
    assert raw(server).startswith(b"HTTP/1.1 408"), "a connection without a word"
    assert raw(server, b"GET /hea").startswith(b"HTTP/1.1 408")
    post = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 90\r\n\r\n"
    found = raw(server, post, *(b'{"pro', b'mpt": "', b"x"), wait=0.3)
    assert found.startswith(b"HTTP/1.1 408") and b"the body took more than 1.5 s" in found
    assert 3 < time.monotonic() - began < 60
    # The limit also applies to later requests of a connection, but not to idle time between requests.
    twice = raw(server, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"GET /hea", wait=2.0)
    assert twice.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in twice
    # Nor does it apply to a slow answer: only the arrival of the request is timed.
    ask = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ask, timeout=60) as stream:
        assert list(stream.iter_lines())[-2] == "data: [DONE]"
    assert server.stats()["pages_owned"] == 0


def test_a_chat_template_that_loops_delays_neither_prompts_nor_the_end(impatient):
    server = impatient
    server.wait_log("chat template: fails in a trial")
    chat = CHAT + '"stream": false}'
    refused = post(server, "/v1/chat/completions", chat)
    assert refused.status_code == 400 and "took more than 1 s" in refused.text
    threads = [threading.Thread(target=lambda: post(server, "/v1/chat/completions", chat)) for _ in range(3)]
    for thread in threads:
        thread.start()
    answer = post(server, "/v1/completions", json.dumps({"prompt": "a b " * 300, "max_tokens": 1}))
    assert answer.status_code == 200, answer.text
    late = post(server, "/v1/chat/completions", CHAT + '"timeout": 0.1}')
    assert late.status_code in (503, 504), late.text
    assert server.stop() == 0, "".join(server.log)
    for thread in threads:
        thread.join()
