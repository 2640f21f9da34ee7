"""The choice among checkpoint readers, those of packages included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.core.checkpoint import FolderCheckpoint, open_checkpoint, reader_problems, readers
from dovetail.core.compose.registry import Package, Registry
from dovetail.core.errors import ConfigError, PluginError

ACME, OTHER = Package("acme", "1.0"), Package("other", "2.0")
FOLDER = (Package("dovetail", "0"), "dovetail.core.checkpoint:FolderCheckpoint")
Installed = Callable[..., Registry]


class Notes(FolderCheckpoint):
    @classmethod
    def recognizes(cls, path: Path) -> bool:
        return path.suffix == ".notes"


class Anything(FolderCheckpoint):
    @classmethod
    def recognizes(cls, path: Path) -> bool:
        return True


class Fails(FolderCheckpoint):
    @classmethod
    def recognizes(cls, path: Path) -> bool:
        raise OSError("no luck")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """install((package, reference), ...): make these the readers."""

    def install(*found: tuple[Package, str]) -> Registry:
        registry = Registry(checkpoint_readers=found)
        monkeypatch.setattr(readers, "installed", lambda: registry)
        return registry

    return install


def test_a_package_reads_its_files(install: Installed, tmp_path: Path) -> None:
    install(FOLDER, (ACME, f"{__name__}:Notes"))
    (tmp_path / "model.notes").touch()
    (tmp_path / "config.json").write_text("{}")
    assert type(open_checkpoint(tmp_path / "model.notes")) is Notes
    assert type(open_checkpoint(tmp_path)) is FolderCheckpoint


def test_two_readers_of_one_path_are_an_error(install: Installed, tmp_path: Path) -> None:
    install((ACME, f"{__name__}:Notes"), (OTHER, f"{__name__}:Anything"))
    (tmp_path / "model.notes").touch()
    with pytest.raises(ConfigError, match=r"Notes of acme 1\.0 and Anything of other 2\.0 recognize it.*DOVETAIL_P"):
        open_checkpoint(tmp_path / "model.notes")


def test_what_no_reader_recognizes_is_said(install: Installed, tmp_path: Path) -> None:
    install(FOLDER)
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match=r"model\.bin: this file is of no known format"):
        open_checkpoint(tmp_path / "model.bin")
    with pytest.raises(ConfigError, match=r"no config\.json in"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (f"{__name__}:Fails", "Fails.recognizes fails: OSError: no luck"),
        ("acme_nowhere:Reader", "the checkpoint reader acme_nowhere:Reader does not load: ModuleNotFoundError"),
        ("pathlib:Path", "the checkpoint reader pathlib:Path is not a subclass of Checkpoint"),
    ],
)
def test_a_reader_that_fails_names_its_package(reference: str, words: str, install: Installed, tmp_path: Path) -> None:
    registry = install(FOLDER, (ACME, reference))
    with pytest.raises(PluginError, match=rf"acme 1\.0.*{words}"):
        open_checkpoint(tmp_path)
    assert [problem.package for problem in reader_problems(registry)] == ["acme 1.0"] * ("fails" not in words)
