"""The server's log."""

from __future__ import annotations

import io
import json
import logging

import pytest

from dovetail.core import logs


@pytest.fixture
def stream() -> io.StringIO:
    root, ours, out = logging.getLogger(), logging.getLogger("dovetail"), io.StringIO()
    before = root.handlers[:], root.level, ours.level
    root.handlers.clear()
    logs.set_up("json", stream=out)
    yield out
    root.handlers[:], root.level, ours.level = before


def test_a_line_is_one_json_object(stream):
    logging.getLogger("dovetail.x").info("two\nlines %d", 7, extra={"status": 200})
    logging.getLogger("somebody.else").info("chatter")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("dovetail.x").exception("no")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "two\nlines 7" and first["status"] == 200
    assert (first["level"], first["logger"], first["time"][-6:]) == ("info", "dovetail.x", "+00:00")
    assert "ValueError: broken" in second["exception"]
