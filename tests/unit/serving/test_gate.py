"""The middleware between uvicorn and the endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.keys import Keys
from dovetail.plugins.app.serve.transport import Gate

START = {"type": "http.response.start", "status": 500, "headers": []}


def through(app: Callable[..., Awaitable[None]]) -> list[dict]:
    gate = Gate(app, ServeConfig(), Keys({}), lambda status: None)
    sent: list[dict] = []

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
    asyncio.run(gate(scope, receive, send))
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
