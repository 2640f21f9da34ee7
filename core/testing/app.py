"""The contract suite of apps. Subclass AppContract in a test module and override `make`.

It runs the app in this process, as the command line does, on what `make` composes: choose what is small.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dovetail.core.compose import AppConfig, Composition, compose
from dovetail.core.interfaces import App


class AppContract:
    """What dovetail.core.interfaces.App asks of an app. `make` is the only thing that must be overridden."""

    prompts: ClassVar[Sequence[str]] = ()
    """Words after `--` of the run."""
    writes: ClassVar[bool] = True
    """Whether the run prints something to stdout."""

    def make(self) -> Composition:
        """A small run: compose([...], app="mine")."""
        raise NotImplementedError('return a composition of a small run: compose(["model=tiny"], app="mine")')

    def run(self) -> int:
        return self.make().run(self.prompts)

    @pytest.fixture(autouse=True)
    def _in_an_empty_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    # What it says of itself.

    def test_its_class_and_config_are_an_app_s(self) -> None:
        part = self.make().app_part
        assert issubclass(part.target(), App) and isinstance(part.config, AppConfig)
        assert (type(part.config).__doc__ or "").strip(), "its config has no docstring: app=plugins shows it"
        undocumented = [name for name, field in type(part.config).model_fields.items() if not field.description]
        assert undocumented == [], "options without a docstring"

    def test_its_config_needs_no_torch(self) -> None:
        """Listing and validating import it."""
        module = type(self.make().app_part.config).__module__
        code = f"import sys, {module}; raise SystemExit('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr or f"importing {module} loads torch"

    def test_what_was_asked_composes_again(self) -> None:
        """So that ranks and recordings can."""
        first = self.make()
        again = compose(first.overrides, registry=first.registry)
        assert again.to_yaml() == first.to_yaml()

    def test_it_takes_the_prompts_it_is_given(self) -> None:
        composition = self.make()
        assert composition.takes_prompts or not self.prompts, "prompts are given, and takes_prompts is False"

    # What it does.

    def test_it_runs(self, capfd: pytest.CaptureFixture[str]) -> None:
        """With the parts that it declares in `needs`: it finds no others."""
        code = self.run()
        assert type(code) is int and code == 0, f"run returned {code!r}; an exit code is an int, 0 for success"
        out = capfd.readouterr().out
        assert bool(out) == self.writes, "results go to stdout" if self.writes else f"it printed {out[:200]!r}"

    def test_it_runs_again(self, capfd: pytest.CaptureFixture[str]) -> None:
        """A built app keeps nothing: one process may run it twice, on one composition or two."""
        composition = self.make()
        codes = [composition.run(self.prompts), composition.run(self.prompts), self.run()]
        assert codes == [0, 0, 0]

    def test_it_leaves_the_process_as_it_was(self, capfd: pytest.CaptureFixture[str]) -> None:
        """No engine stays, no folder or environment changes, no logging is set up."""
        self.run()  # what is loaded once may stay
        before = _surroundings()
        self.run()
        after = _surroundings()
        changed = [f"{what}: {before[what]} became {after[what]}" for what in before if before[what] != after[what]]
        assert changed == [], changed


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
