"""`python run.py app=new new.component=scheduler/mine`: write a package with one component."""

from __future__ import annotations

import keyword
import re
import shlex
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from dovetail.core.compose import KINDS, Composition, Registry
from dovetail.core.compose.wording import did_you_mean, listing
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces.app import App
from dovetail.plugins.app.new.config import NewConfig
from dovetail.plugins.app.new.package import files

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_PACKAGE = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


class NewApp(App):
    config: NewConfig

    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        kind, name = _component(self.config.component, composition.registry)
        package = _package(self.config.package, name)
        made = files(kind, name, package)
        folder = Path(self.config.folder or package)
        _write(folder, made)
        for path in made:
            print(folder / path)
        print(f"\npip install -e {shlex.quote(f'{folder}[test]')}\ndovetail app=check check.package={package}")
        return 0


def _component(text: str, registry: Registry) -> tuple[str, str]:
    kind, slash, name = text.partition("/")
    if not slash:
        raise ConfigError(f"new.component={text} is not of the form <kind>/<name>, such as scheduler/mine")
    if kind not in KINDS:
        raise ConfigError(
            f"new.component={text}: there is no kind `{kind}`.{did_you_mean(kind, KINDS)} Kinds: {listing(KINDS)}."
        )
    if not _NAME.fullmatch(name):
        raise ConfigError(f"new.component={text}: a name is lower case letters, digits and underscores")
    if kind == "app" and name in ("engine", *KINDS):
        raise ConfigError(f"new.component={text}: an app cannot be called `{name}`, the name of a node")
    owners = {r.component.name: str(r.package) for (k, _), r in registry.registered.items() if k == kind}
    owners |= {file.name: file.package for file in registry.files if file.group == kind}
    owners |= {problem.name: problem.package for problem in registry.problems if problem.kind == kind}
    for taken in (name, f"{name}_variant"):
        if taken in owners:
            raise ConfigError(f"new.component={text}: the name is taken, {kind}={taken} is in {owners[taken]}")
    return kind, name


def _package(given: str | None, name: str) -> str:
    package = given or f"dovetail-{name.strip('_').replace('_', '-')}"
    if not _PACKAGE.fullmatch(package):
        raise ConfigError(f"new.package={package}: a name is lower case letters and digits, with single hyphens")
    try:
        found = distribution(package)
    except PackageNotFoundError:
        module = package.replace("-", "_")
        if keyword.iskeyword(module):
            raise ConfigError(f"new.package={package}: its module would be called {module}, a keyword") from None
        # A folder without modules has no origin.
        if (spec := find_spec(module)) is not None and spec.origin is not None:
            reason = f"the module {module} exists already, so that Python might import another one"
            raise ConfigError(f"new.package={package}: {reason}; choose another name") from None
        return package
    raise ConfigError(f"new.package={package}: {found.name} {found.version} is installed; choose another name")


def _write(folder: Path, made: dict[str, str]) -> None:
    """Write the files into an empty or a new folder. Nothing is overwritten."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"new.folder={folder} is not an empty folder: set new.folder to another one")
        for path, text in made.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("x", encoding="utf-8") as opened:
                opened.write(text)
    except OSError as error:
        raise ConfigError(f"new.folder={folder} cannot be written: {error.strerror}") from error
