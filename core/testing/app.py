"""Contract suite for apps. Subclass AppContract in a test module and override `make`.

It runs the app in this process, as the command line does, on the composition of `make`; choose a small one.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dovetail.core.compose import AppConfig, Composition, compose
from dovetail.core.interfaces import App
from dovetail.core.testing.suite import assert_torch_free


class AppContract:
    """Tests of the rules of dovetail.core.interfaces.App. Only `make` must be overridden."""

    prompts: ClassVar[Sequence[str]] = ()
    """Arguments after `--`."""
    writes: ClassVar[bool] = True
    """Whether a run prints to stdout."""

    def make(self) -> Composition:
        """Return the composition of a small run: compose([...], app="mine")."""
        raise NotImplementedError('return a composition of a small run: compose(["model=tiny"], app="mine")')

    def run(self) -> int:
        return self.make().run(self.prompts)

    @pytest.fixture(autouse=True)
    def _in_an_empty_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    # Properties

    def test_its_class_and_config_are_an_app_s(self) -> None:
        part = self.make().app_part
        assert issubclass(part.target(), App), f"{part.target()} must be a subclass of App"
        assert isinstance(part.config, AppConfig), f"{type(part.config)} must be a subclass of AppConfig"
        assert (type(part.config).__doc__ or "").strip(), "the config needs a docstring, which app=plugins prints"
        undocumented = [name for name, field in type(part.config).model_fields.items() if not field.description]
        assert undocumented == [], "each config field needs a docstring"

    def test_its_config_needs_no_torch(self) -> None:
        """Listing and validating import the module of the config."""
        assert_torch_free(type(self.make().app_part.config).__module__)

    def test_its_overrides_compose_again(self) -> None:
        """Ranks and recordings repeat the composition from its overrides."""
        first = self.make()
        again = compose(first.overrides, registry=first.registry)
        assert again.to_yaml() == first.to_yaml(), "composing the overrides again must give an equal composition"

    def test_it_accepts_prompts(self) -> None:
        composition = self.make()
        assert composition.takes_prompts or not self.prompts, "`prompts` are set, but takes_prompts is False"

    # Runs

    def test_it_runs(self, capfd: pytest.CaptureFixture[str]) -> None:
        """A run has only the parts declared in `needs`."""
        code = self.run()
        assert type(code) is int and code == 0, f"run must return the exit code 0, got {code!r}"
        out = capfd.readouterr().out
        assert bool(out) == self.writes, f"writes = {self.writes}, but stdout is {out[:200]!r}"

    def test_it_runs_again(self, capfd: pytest.CaptureFixture[str]) -> None:
        """One process may run an app several times, on one composition or two."""
        composition = self.make()
        codes = [composition.run(self.prompts), composition.run(self.prompts), self.run()]
        assert codes == [0, 0, 0], "each of three runs in one process must return 0"

    def test_it_leaves_the_process_as_it_was(self, capfd: pytest.CaptureFixture[str]) -> None:
        """No engine remains, and working directory, environment and logging are unchanged."""
        self.run()  # one-time loading is allowed
        before = _surroundings()
        self.run()
        after = _surroundings()
        changed = [f"{what}: {before[what]} became {after[what]}" for what in before if before[what] != after[what]]
        assert changed == [], f"a run must leave the process as it was: {changed}"


def _surroundings() -> dict[str, Any]:
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "working directory": os.getcwd(),
        "environment": dict(os.environ),
        "handlers of the root logger": list(logging.root.handlers),
        "level of the root logger": logging.root.level,
        "stdout": sys.stdout,
        "stderr": sys.stderr,
        "arguments": list(sys.argv),
    }
