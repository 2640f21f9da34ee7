"""Every reader gets every message, complete and in order, however small the ring and however slow the reader."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dovetail.core.parallel.ring import RingReader, RingWriter


class TooLong(Exception):
    """The other side exceeded the test's time limit."""


def within(seconds: float):
    """Return an idle function with a time limit, so that a broken ring fails the test instead of blocking it."""
    deadline = time.monotonic() + seconds

    def idle(pause: float) -> None:
        if time.monotonic() > deadline:
            raise TooLong
        time.sleep(pause)

    return idle


def traffic(seed: int, count: int, longest: int) -> list[bytes]:
    rng = random.Random(seed)
    return [b"", *(rng.randbytes(rng.randint(0, longest)) for _ in range(count))]


@pytest.fixture
def ring(request: pytest.FixtureRequest) -> Iterator[tuple[RingWriter, list[RingReader]]]:
    readers, capacity = request.param
    writer = RingWriter(readers, capacity)
    ends = [RingReader(os.dup(writer.fd), i) for i in range(readers)]
    yield writer, ends
    for end in (writer, *ends):
        end.close()


# No message length divides these capacities, so messages and their lengths wrap at every offset.
@pytest.mark.parametrize("ring", [(1, 104), (3, 104), (2, 8), (1, 1 << 16)], indirect=True)
def test_messages_arrive_whole_and_in_order(ring: tuple[RingWriter, list[RingReader]]) -> None:
    writer, readers = ring
    sent = traffic(0, 60 if writer.capacity < 64 else 300, longest=250)  # A small ring wraps many times per message.
    received: list[list[bytes]] = [[] for _ in readers]

    def read(i: int) -> None:
        idle = within(60)
        received[i] += (readers[i].recv(idle) for _ in sent)

    def write() -> None:
        idle = within(60)
        for message in sent:
            writer.send(message, idle)

    # End all readers before the ring's memory is released, even if one fails: reading released memory crashes the
    # process.
    with ThreadPoolExecutor(1 + len(readers)) as pool:
        ends = [pool.submit(write), *(pool.submit(read, i) for i in range(len(readers)))]
    for end in ends:
        end.result()
    assert all(messages == sent for messages in received)


@pytest.mark.parametrize("ring", [(2, 64)], indirect=True)
def test_the_writer_waits_for_the_slowest_reader(ring: tuple[RingWriter, list[RingReader]]) -> None:
    writer, (fast, slow) = ring
    message = bytes(range(20))
    for _ in range(2):
        writer.send(message, within(0))
        assert fast.recv(within(0)) == message
    with pytest.raises(TooLong):
        writer.send(message, within(0.05))
    assert [slow.recv(within(0)) for _ in range(2)] == [message, message]


@pytest.mark.parametrize("ring", [(1, 64)], indirect=True)
def test_a_reader_waits_and_its_wait_can_be_ended(ring: tuple[RingWriter, list[RingReader]]) -> None:
    with pytest.raises(TooLong):
        ring[1][0].recv(within(0.02))


def test_without_readers_nothing_waits() -> None:
    writer = RingWriter(0, 64)
    for _ in range(10):
        writer.send(bytes(50), within(0))
    writer.close()


_READER = """
import hashlib, sys, time
from dovetail.core.parallel.ring import RingReader
reader = RingReader(int(sys.argv[1]), int(sys.argv[2]))
digest = hashlib.sha256()
for i in range(int(sys.argv[3])):
    if i % 100 == 50:
        time.sleep(0.01)
    message = reader.recv()
    digest.update(len(message).to_bytes(8, "little") + message)
print(digest.hexdigest())
"""


def test_between_processes() -> None:
    """Two reader processes on a ring with room for a few messages. One of them sometimes falls behind."""
    sent = traffic(1, 2000, longest=3000)
    digest = hashlib.sha256()
    for message in sent:
        digest.update(len(message).to_bytes(8, "little") + message)
    writer = RingWriter(2, 8000)
    command = [sys.executable, "-c", _READER, str(writer.fd)]
    readers = [
        subprocess.Popen([*command, str(i), str(len(sent))], pass_fds=[writer.fd], stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    try:
        idle = within(60)
        for message in sent:
            writer.send(message, idle)
        outputs = [reader.communicate(timeout=60)[0].strip() for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
        writer.close()
    assert outputs == [digest.hexdigest()] * 2
