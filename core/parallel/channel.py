"""Control messages between two processes: a JSON object and optional raw bytes. No pickle."""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

_LENGTHS = struct.Struct("<IQ")


class ChannelClosed(Exception):
    """The other end is closed."""


class Channel:
    """One end of a connected stream socket. Several threads may send; one receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any], raw: bytes | memoryview = b"") -> None:
        text = json.dumps(message, separators=(",", ":")).encode()
        try:
            with self._sending:
                self._socket.sendall(_LENGTHS.pack(len(text), len(raw)) + text)
                self._socket.sendall(raw)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed from error

    def recv(self) -> tuple[dict[str, Any], bytes]:
        """Wait for one complete message and return it."""
        text_bytes, raw_bytes = _LENGTHS.unpack(self._take(_LENGTHS.size))
        return json.loads(self._take(text_bytes)), bytes(self._take(raw_bytes))

    def wait(self, seconds: float) -> bool:
        """Whether data or the end of the stream can be received within `seconds`."""
        poll = select.poll()  # Unlike select(), it accepts descriptors of 1024 and more.
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def at_end(self) -> bool:
        """Whether the other end is closed and all its data was received. Blocks until this is known."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except ConnectionResetError:
            return True

    def _take(self, count: int) -> bytearray:
        taken = bytearray(count)
        rest = memoryview(taken)
        while rest:
            try:
                n = self._socket.recv_into(rest)
            except ConnectionResetError as error:
                raise ChannelClosed from error
            if n == 0:
                raise ChannelClosed
            rest = rest[n:]
        return taken

    def close(self) -> None:
        self._socket.close()
