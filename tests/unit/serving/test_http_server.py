"""A server's process collects garbage rarely while it answers requests."""

from __future__ import annotations

import asyncio
import gc
import socket
from types import SimpleNamespace

import pytest

from dovetail.plugins.app.serve.http_server import HttpServer


def test_what_is_loaded_is_not_collected_while_requests_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    before = gc.get_threshold()

    async def nothing(*given: object) -> None: ...

    async def serve(self: HttpServer, sockets: list[socket.socket]) -> None:
        seen.append((gc.get_freeze_count() > 0, gc.get_threshold() > before))

    monkeypatch.setattr(HttpServer, "serve", serve)
    server = HttpServer.__new__(HttpServer)
    client = SimpleNamespace(start=lambda: None, close=nothing)
    server.service = SimpleNamespace(client=client, text=SimpleNamespace(prepare=nothing), close=lambda: None)  # type: ignore[assignment]
    server.report = False
    with socket.socket() as sock:
        asyncio.run(server.answer(sock))
    assert seen == [(True, True)] and not gc.get_freeze_count() and gc.get_threshold() == before
