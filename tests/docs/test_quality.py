"""Every variant of the documented quality commands composes; running them takes minutes."""

from __future__ import annotations

import shlex

import pytest

from dovetail.core.compose import compose
from dovetail.plugins.app.quality.app import make_variants

from .commands import SUBSTITUTIONS, commands

COMMANDS = [c.line for c in commands() if c.line.startswith("python run.py app=quality")]


@pytest.mark.parametrize("command", COMMANDS)
def test_variants_compose(command: str) -> None:
    for theirs, ours in SUBSTITUTIONS.items():
        command = command.replace(theirs, ours)
    composition = compose(shlex.split(command, comments=True)[2:])
    assert len(make_variants(composition.app_part.config, composition)) > 1  # type: ignore[arg-type]


def test_there_are_such_commands() -> None:
    assert len(COMMANDS) >= 4
