"""The middleware between uvicorn and the endpoints."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence

import pytest
from pydantic import ValidationError

from dovetail.core.errors import ConfigError, EngineDown
from dovetail.plugins.app.serve import exchange
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.hosts import refuse_open
from dovetail.plugins.app.serve.keys import Keys
from dovetail.plugins.app.serve.transport import EventStream, Gate

START = {"type": "http.response.start", "status": 500, "headers": []}


def through(
    app: Callable[..., Awaitable[None]],
    config: ServeConfig | None = None,
    keys: Keys | None = None,
    headers: Sequence[tuple[bytes, bytes]] = (),
    path: str = "/x",
    on_status: Callable[[int], None] = lambda status: None,
) -> list[dict]:
    gate = Gate(app, config or ServeConfig(), keys or Keys({}), on_status)
    sent: list[dict] = []
    body = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict:
        return body.pop() if body else await asyncio.Event().wait()

    async def send(message: dict) -> None:
        sent.append(message)

    asyncio.run(gate({"type": "http", "method": "GET", "path": path, "headers": list(headers)}, receive, send))
    return sent


def test_an_error_that_was_answered_goes_no_further(caplog):
    """Otherwise uvicorn would close the connection that the client may be reusing."""

    async def app(scope, receive, send):
        await send(START)
        await send({"type": "http.response.body", "body": b"{}"})
        raise ZeroDivisionError

    assert len(through(app)) == 2
    assert "GET /x failed" in caplog.text and "ZeroDivisionError" in caplog.text


def test_an_error_in_the_middle_of_an_answer_ends_the_connection():
    async def app(scope, receive, send):
        await send(START)
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        through(app)


OK = [{**START, "status": 200}, {"type": "http.response.body", "body": b"ok"}]


async def answering(scope, receive, send):
    exchange.of(scope).output_tokens = exchange.of(scope).prompt_tokens = 3
    for message in OK:
        await send(message)


def status(config: dict, keys: dict, **headers: str) -> int:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return through(answering, ServeConfig(**config), Keys(keys), raw)[0]["status"]


KEY = {hashlib.sha256(b"secret").digest(): "team-a"}


@pytest.mark.parametrize(
    ("config", "host", "expected"),
    [
        ({}, "localhost:8000", 200),
        ({}, "LOCALHOST.", 200),
        ({}, "127.0.0.1:8000", 200),
        ({}, "[::1]:8000", 200),
        ({}, "10.0.0.7", 200),
        ({}, "evil.example:8000", 403),
        ({}, "localhost.evil.example", 403),
        ({}, "127.0.0.1.evil.example", 403),
        ({}, "[::1].evil.example", 403),
        ({"host": "GPU1.lan"}, "gpu1.lan:8000", 200),
        ({"allowed_hosts": ["API.example.org", "*.lan"]}, "api.example.org", 200),
        ({"allowed_hosts": ["api.example.org", "*.lan"]}, "gpu1.lan", 200),
        ({"allowed_hosts": ["api.example.org", "*.lan"]}, "lan", 403),
        ({"allowed_hosts": ["api.example.org", "*.lan"]}, "localhost", 403),
        ({"allowed_hosts": ["*"]}, "evil.example", 200),
    ],
)
def test_a_name_that_a_page_could_rebind_is_refused(config: dict, host: str, expected: int):
    assert status(config, {}, host=host) == expected


def test_with_keys_any_name_is_accepted_unless_names_are_listed():
    bearer = {"authorization": "Bearer secret"}
    assert status({}, KEY, host="api.example.org", **bearer) == 200
    assert status({}, KEY, host="api.example.org") == 401
    assert status({"allowed_hosts": ["other.example.org"]}, KEY, host="api.example.org", **bearer) == 403


@pytest.mark.parametrize("name", ["http://x", "x:80", "", "*x", "a b", "[::1]"])
def test_a_name_that_no_header_has_is_refused_at_the_start(name: str):
    with pytest.raises(ValidationError):
        ServeConfig(allowed_hosts=(name,))


@pytest.mark.parametrize(
    ("address", "config", "keys", "fine"),
    [
        ("127.0.0.1", {}, False, True),
        ("127.8.0.1", {}, False, True),
        ("::1", {}, False, True),
        ("0.0.0.0", {}, False, False),
        ("::", {}, False, False),
        ("10.0.0.7", {}, False, False),
        ("fe80::1%eth0", {}, False, False),
        ("0.0.0.0", {"open": True}, False, True),
        ("0.0.0.0", {}, True, True),
    ],
)
def test_a_server_that_others_can_reach_needs_keys(address: str, config: dict, keys: bool, fine: bool):
    if fine:
        return refuse_open(ServeConfig(**config), address, keys=keys)
    with pytest.raises(ConfigError, match=r"serve.host=.*serve.api_key_file or DOVETAIL_API_KEYS.*serve.open=true"):
        refuse_open(ServeConfig(**config), address, keys=keys)


def test_a_compressed_body_is_refused():
    assert status({}, {}, content_encoding="gzip") == 415
    assert status({}, {}, content_encoding="identity") == 200


@pytest.mark.parametrize(
    ("given", "kept"), [("mine-1", True), ("", False), ("a b", False), ("x" * 200, False), ("a\nb", False)]
)
def test_every_answer_has_a_request_id(given: str, kept: bool):
    for app in (answering, "refused"):
        headers = [(b"x-request-id", given.encode())] + [(b"host", b"evil.example")] * (app == "refused")
        sent = through(answering, headers=headers)
        (found,) = (value.decode() for name, value in sent[0]["headers"] if name == b"x-request-id")
        assert found == given if kept else re.fullmatch("req_[0-9a-f]{32}", found)
    assert OK[0]["headers"] == []


def test_the_line_of_a_request_has_its_key_and_tokens(caplog):
    caplog.set_level("INFO", "dovetail")
    headers = [(b"authorization", b"Bearer secret"), (b"x-request-id", b"mine")]
    through(answering, ServeConfig(log_requests=True), Keys(KEY), headers, path="/x\ny")
    (line,) = caplog.records
    pattern = r"GET /x%0Ay 200 [\d.]+ ms request_id=mine key=team-a prompt_tokens=3 cached_tokens=0 output_tokens=3"
    assert re.fullmatch(pattern, line.getMessage())
    assert (line.status, line.key, line.output_tokens) == (200, "team-a", 3)


def test_a_stream_that_fails_is_counted_with_its_status(caplog):
    """Its head was sent with 200."""
    caplog.set_level("INFO", "dovetail")

    async def pieces():
        raise EngineDown("the engine died")
        yield b""

    async def app(scope, receive, send):
        await EventStream(b"data: 1\n\n", pieces(), lambda: None)(scope, receive, send)

    statuses: list[int] = []
    sent = through(app, ServeConfig(log_requests=True), on_status=statuses.append)
    assert sent[0]["status"] == 200 and b"the engine died" in sent[2]["body"]
    assert statuses == [503] and " 503 " in caplog.text
