"""A slow client gets all of the output in fewer pieces."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from dovetail.core.frontend.client import Stream
from dovetail.core.frontend.outputs import Delta
from dovetail.plugins.app.serve.output import choice_deltas


def test_what_came_while_the_client_was_slow_is_one_piece():
    async def follow() -> tuple[list[list[tuple[int, Delta]]], SimpleNamespace]:
        stream = Stream(asyncio.get_running_loop())
        job = SimpleNamespace(stream=stream, output_tokens=0, outcome="", predicted=None)
        taken = []
        for sample, text, last in ((0, "a", False), (1, "x", False), (0, "b", False)):
            stream.put([Delta(sample, text, (ord(text),))], last=last)
        async for items in choice_deltas([job], 2):  # type: ignore[list-item]
            taken.append(items)
            if len(taken) == 1:
                # The engine goes on while this piece is being written.
                stream.put([Delta(0, "c", (99,))], last=False)
                stream.put([Delta(0, "d", (100,), finish_reason="length")], last=False)
                stream.put([Delta(1, "y", (121,), finish_reason="stop")], last=True)
        return taken, job

    taken, job = asyncio.run(follow())
    assert [[(at, delta.text, delta.token_ids) for at, delta in items] for items in taken] == [
        [(0, "ab", (97, 98)), (1, "x", (120,))],
        [(0, "cd", (99, 100)), (1, "y", (121,))],
    ]
    assert [delta.finish_reason for _, delta in taken[1]] == ["length", "stop"]
    assert job.output_tokens == 6
