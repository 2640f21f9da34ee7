"""Limits of a connection: heads, trailers, and bodies that arrive after the answer."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn
from uvicorn.server import ServerState

from dovetail.plugins.app.serve import protocol

BODY_BYTES = 1 << 20
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = GET + b"transfer-encoding: chunked\r\n\r\n"
scopes: list[dict] = []


async def app(scope, receive, send):
    """Answer without reading the body, except at /read."""
    scopes.append(scope)
    while scope["path"] == "/read" and (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def closed_while_sending(self, piece: bytes, times: int, pause: float = 0.0) -> bool:
        """Send a piece again and again. Returns whether the server closed the connection meanwhile."""
        try:
            for _ in range(times):
                self.writer.write(piece)
                await self.writer.drain()
                await asyncio.sleep(pause)
                if self.reader.at_eof():
                    return True
        except ConnectionError:
            return True
        return False


def talk(conversation, seconds: float = 30.0, keep_alive: float = 75.0):
    """Run a conversation with a server of the protocol."""

    async def run():
        bounded = protocol.bounded(seconds, BODY_BYTES)
        config = uvicorn.Config(app, log_config=None, ws="none", timeout_keep_alive=keep_alive)
        server = await asyncio.get_running_loop().create_server(
            lambda: bounded(config, ServerState(), {}), "127.0.0.1", 0
        )
        scopes.clear()
        async with server, asyncio.timeout(15):
            connection = Connection(*await asyncio.open_connection(*server.sockets[0].getsockname()))
            found = await conversation(connection)
            connection.writer.close()
            return found

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (CHUNKED + b"0\r\n", b"x-trailer: " + b"a" * 4000 + b"\r\n"),
        (CHUNKED + b"0\r\nx-trailer: ", b"a" * 4000),
        (CHUNKED.replace(b"/", b"/read", 1) + b"0\r\n", b"x-trailer: " + b"a" * 4000 + b"\r\n"),
        (CHUNKED + b"3; extension=", b"a" * 4000),
        (CHUNKED, b"fa0\r\n" + b"a" * 4000 + b"\r\n"),
        (GET + b"content-length: 1000000000\r\n\r\n", b"a" * 4000),
    ],
    ids=["trailers", "one trailer", "trailers of a body that is read", "extension of a chunk", "chunks", "body"],
)
def test_what_follows_an_answer_is_bounded(begin: bytes, piece: bytes):
    async def conversation(connection: Connection) -> bool:
        connection.writer.write(begin)
        return await connection.closed_while_sending(piece, 4 * BODY_BYTES // 4000)

    assert talk(conversation)
    assert all(sum(map(len, (n + v for n, v in scope["headers"]))) < 1000 for scope in scopes)


@pytest.mark.parametrize("begin", [CHUNKED + b"f4240\r\n", CHUNKED + b"0\r\nx-trailer: "], ids=["body", "trailer"])
def test_a_body_that_drips_after_its_answer_ends_the_connection(begin: bytes):
    async def conversation(connection: Connection) -> bool:
        connection.writer.write(begin)
        await connection.reader.readuntil(b"ok")
        return await connection.closed_while_sending(b"a", 500, 0.02)

    assert talk(conversation, seconds=0.2)


def test_a_connection_is_reused_after_the_rest_of_a_body():
    """Trailers are not headers, neither of their request nor of the next."""

    async def conversation(connection: Connection) -> bool:
        connection.writer.write(CHUNKED + b"3\r\n")
        await connection.reader.readuntil(b"ok")
        connection.writer.write(b"abc\r\n0\r\nauthorization: Bearer x\r\n\r\n" + GET + b"\r\n")
        await connection.reader.readuntil(b"ok")
        return await connection.closed_while_sending(b"", 20, 0.02)

    assert not talk(conversation, seconds=0.2)
    assert [[name for name, _ in scope["headers"]] for scope in scopes] == [[b"host", b"transfer-encoding"], [b"host"]]


def test_a_connection_whose_body_ends_after_its_answer_does_not_stay_open():
    async def conversation(connection: Connection) -> bytes:
        connection.writer.write(GET + b"content-length: 3\r\n\r\n")
        await connection.reader.readuntil(b"ok")
        connection.writer.write(b"abc")
        return await connection.reader.read()

    assert talk(conversation, keep_alive=1) == b""


def test_a_long_head_is_refused_even_if_it_arrives_at_once():
    async def conversation(connection: Connection) -> bytes:
        connection.writer.write(GET + b"x-a: " + b"a" * 100_000 + b"\r\n\r\n")
        return await connection.reader.read()

    assert talk(conversation).startswith(b"HTTP/1.1 431")
    assert not scopes


def test_a_shortage_of_file_descriptors_is_logged_once_a_minute(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(protocol, "_warned_at", -1e9)
    protocol._warn_of_descriptors(900)
    assert not caplog.records
    for descriptor in (1000, 1001):
        protocol._warn_of_descriptors(descriptor)
    (line,) = caplog.messages
    assert line.startswith("1001 of 1024 file descriptors are in use") and "LimitNOFILE" in line
