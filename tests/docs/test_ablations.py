"""Every variant of the ablation commands composes, also of those that need minutes or GPUs and are not run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError
from dovetail.plugins.app.ablate.variants import make

from .commands import Command, blocks, commands

pytestmark = pytest.mark.nightly

WITH_A_PACKAGE = ("first-plugin.md", "publishing-a-plugin.md")
"""Pages whose ablations have parts of a package that the page writes."""
ALL = os.environ.get("DOVETAIL_GRID") == "pairs"
"""Whether the large studies and every second one of the others are composed as well, which takes a minute."""
COMMANDS = [
    c
    for c in commands()
    if c.line.startswith("python run.py") and ("ablat" in c.line or "ladder" in c.line) and c.page not in WITH_A_PACKAGE
    if "app=bench" not in c.line and (ALL or c.page != "studies.md" or "_small" in c.line)
]


@pytest.mark.parametrize("command", COMMANDS if ALL else COMMANDS[::2], ids=lambda c: c.line)
def test_variants_compose(command: Command, tmp_path: Path) -> None:
    for block in blocks("yaml"):
        if block.page == command.page:
            file = tmp_path / str(block.file)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text.partition("\n")[2], encoding="utf-8")
    words = [word for word in command.argv if word not in ("--cfg", "job")]
    folders = []
    while "--config-dir" in words:
        at = words.index("--config-dir")
        folders.append(str(tmp_path / words[at + 1]))
        del words[at : at + 2]
    try:
        composition = compose(words, config_dirs=folders)
        found = make(composition.app_part.config, composition)  # type: ignore[arg-type]
    except ConfigError as error:
        assert command.exit_code == 2, error
    else:
        assert len(found) > 1 and command.exit_code == 0


def test_there_are_such_commands() -> None:
    assert len(COMMANDS) >= 9
