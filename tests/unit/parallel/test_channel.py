"""Control messages arrive complete; a closed end raises an exception instead of blocking."""

from __future__ import annotations

import socket
import threading

import pytest

from dovetail.core.parallel.channel import Channel, ChannelClosed


@pytest.fixture
def ends():
    channels = [Channel(end) for end in socket.socketpair()]
    yield channels
    for channel in channels:
        channel.close()


def test_json_and_raw_bytes_longer_than_a_socket_buffer(ends: list[Channel]) -> None:
    one, other = ends
    raw = bytes(range(256)) * 16_000
    sender = threading.Thread(target=one.send, args=({"op": "adapter", "rows": [1, 2], "name": "é"}, raw))
    sender.start()
    assert other.recv() == ({"op": "adapter", "rows": [1, 2], "name": "é"}, raw)
    sender.join()


def test_the_end_is_told_apart_from_a_message(ends: list[Channel]) -> None:
    one, other = ends
    assert not other.wait(0)
    one.send({"op": "last"})
    one.close()
    assert other.wait(0) and not other.at_end()
    assert other.recv() == ({"op": "last"}, b"")
    assert other.wait(0) and other.at_end()
    with pytest.raises(ChannelClosed):
        other.recv()


def test_a_message_cut_short_is_the_end() -> None:
    one, other = socket.socketpair()
    channel = Channel(other)
    one.sendall(b"\x40\0\0\0" + bytes(8) + b'{"op"')
    one.close()
    with pytest.raises(ChannelClosed):
        channel.recv()
    channel.close()


def test_sending_to_a_closed_end(ends: list[Channel]) -> None:
    ends[1].close()
    with pytest.raises(ChannelClosed):
        ends[0].send({"op": "load"})
