"""Apps with one fault each; the suite must reject them."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import Field

from dovetail.core.compose import AppConfig, Component, Composition, Package, Registered, Registry, compose, installed
from dovetail.core.interfaces import App
from dovetail.core.testing.app import AppContract
from dovetail.core.testing.suite import OUTCOMES

pytestmark = pytest.mark.nightly


class SoundConfig(AppConfig):
    """Prints a word."""

    word: str = "hello"
    """The word to print."""


class Undocumented(AppConfig):
    """Has an option without a docstring."""

    word: str = "hello"


class Random(AppConfig):
    """Has a different default each time."""

    word: str = Field(default_factory=lambda: os.urandom(8).hex())
    """The word to print."""


class Heavy(SoundConfig):
    """Is in a module that loads torch."""

    __module__ = "dovetail.core.ops.norm"


class Sound(App):
    def run(self, composition: Composition, prompts: object) -> int:
        print("hello")
        return 0


class ReturnsNothing(Sound):
    def run(self, composition: Composition, prompts: object) -> int:
        super().run(composition, prompts)
        return None  # type: ignore[return-value]


class SaysNothing(Sound):
    def run(self, composition: Composition, prompts: object) -> int:
        return 0


class ReadsWhatItNeverNamed(Sound):
    def run(self, composition: Composition, prompts: object) -> int:
        return super().run(composition, prompts) + len(composition.part("model").name)


class RunsOnce(Sound):
    runs = 0

    def run(self, composition: Composition, prompts: object) -> int:
        RunsOnce.runs += 1
        return min(RunsOnce.runs - 1, 1)


class LeavesAThread(Sound):
    def run(self, composition: Composition, prompts: object) -> int:
        threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()
        return super().run(composition, prompts)


class ChangesTheFolder(Sound):
    def run(self, composition: Composition, prompts: object) -> int:
        folder = Path(f"run{len(os.getcwd())}")
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        return super().run(composition, prompts)


class SetsUpLogging(Sound):
    def run(self, composition: Composition, prompts: object) -> int:
        logging.root.addHandler(logging.NullHandler())
        return super().run(composition, prompts)


BROKEN: list[tuple[type[App], type[AppConfig], str]] = [
    (Sound, Undocumented, "test_its_class_and_config_are_an_app_s"),
    (Sound, Random, "test_its_overrides_compose_again"),
    (Sound, Heavy, "test_its_config_needs_no_torch"),
    (ReturnsNothing, SoundConfig, "test_it_runs"),
    (SaysNothing, SoundConfig, "test_it_runs"),
    (ReadsWhatItNeverNamed, SoundConfig, "test_it_runs"),
    (RunsOnce, SoundConfig, "test_it_runs_again"),
    (LeavesAThread, SoundConfig, "test_it_leaves_the_process_as_it_was"),
    (ChangesTheFolder, SoundConfig, "test_it_leaves_the_process_as_it_was"),
    (SetsUpLogging, SoundConfig, "test_it_leaves_the_process_as_it_was"),
]


@pytest.fixture
def suite_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[object]:
    monkeypatch.chdir(tmp_path)
    handlers = list(logging.root.handlers)

    def build(app: type[App], config: type[AppConfig]) -> AppContract:
        module = ModuleType("app_here")
        module.Here = app  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "app_here", module)
        component = Component(kind="app", name="here", config=config, target="app_here:Here", api="app/0.1")
        own = installed()
        registry = Registry(
            [*own.registered.values(), Registered(component, Package("acme", "1.0"))], (), own.config_dirs
        )

        class Suite(AppContract):
            def make(self) -> Composition:
                return compose(app="here", registry=registry)

        return Suite()

    yield build
    logging.root.handlers = handlers


@pytest.mark.parametrize(("app", "config", "test"), BROKEN, ids=[f"{a.__name__}-{c.__name__}" for a, c, _ in BROKEN])
def test_the_suite_rejects(suite_of, capfd, app: type[App], config: type[AppConfig], test: str) -> None:
    arguments = (capfd,) if "run" in test or "process" in test else ()
    with pytest.raises(OUTCOMES):
        getattr(suite_of(app, config), test)(*arguments)


def test_the_suite_rejects_prompts_for_an_app_that_takes_none(suite_of) -> None:
    suite = suite_of(Sound, SoundConfig)
    suite.prompts = ("hello",)
    with pytest.raises(AssertionError, match="takes_prompts is False"):
        suite.test_it_accepts_prompts()


TESTS = [name for name in vars(AppContract) if name.startswith("test_") and "torch" not in name]


@pytest.mark.parametrize("test", TESTS)
def test_the_unbroken_one_passes(suite_of, capfd, test: str) -> None:
    arguments = (capfd,) if "run" in test or "process" in test else ()
    getattr(suite_of(Sound, SoundConfig), test)(*arguments)
