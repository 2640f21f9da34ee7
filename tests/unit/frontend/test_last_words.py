"""The last words of a process whose parent has gone: a lane that lost another one is not the cause of its end."""

from __future__ import annotations

import socket

import pytest

from dovetail.core.parallel.channel import Channel
from dovetail.core.parallel.lane_ranks import LaneLost
from dovetail.core.parallel.lanes import LOST
from dovetail.core.parallel.process import report


@pytest.mark.parametrize(("error", "traced"), [(LaneLost(f"{LOST}: reset by peer"), False), (ValueError("3"), True)])
def test_only_a_cause_has_a_traceback(error: Exception, traced: bool, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    try:
        raise error from ConnectionResetError("reset by peer")
    except Exception as raised:
        report(Channel(ours), raised)
    printed = capsys.readouterr().err
    assert str(error) in printed and ("Traceback" in printed) is traced
