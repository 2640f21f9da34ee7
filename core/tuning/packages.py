"""Tuning tables that installed packages ship, Dovetail's own among them. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import as_file, files

from dovetail.core.compose.registry import Package, Problem, Registry
from dovetail.core.errors import ConfigError
from dovetail.core.tuning.table import Check, TuningTable, merged, read_table

BUILTIN = tuple(f"pkg://dovetail.core.tuning/tables/nvidia_{gpu}.json" for gpu in ("h100", "h200"))
"""Tables of the package dovetail."""


def read_packaged(reference: str, origin: str, checks: Mapping[str, Check] | None = None) -> TuningTable:
    """Read the table at "pkg://package.module/folder/file.json", or raise ConfigError."""
    package, _, place = reference.removeprefix("pkg://").partition("/")
    try:
        with as_file(files(package).joinpath(*place.split("/"))) as path:
            return read_table(path, origin, checks)
    except (ImportError, OSError, TypeError) as error:
        raise ConfigError(f"{reference}: cannot be read ({type(error).__name__}: {error})") from None


def builtin_table(checks: Mapping[str, Check] | None = None) -> TuningTable:
    return merged([read_packaged(reference, "dovetail", checks) for reference in BUILTIN])


def each_table(
    registry: Registry, checks: Mapping[str, Check] | None = None
) -> Iterator[tuple[Package, str, TuningTable | Problem]]:
    """Yield (package, reference, table) of all packages; a problem in place of a table that cannot be used. Tables of
    other packages precede Dovetail's own, and the names of packages order those."""
    for package, reference in sorted(registry.tuning_tables, key=lambda entry: (entry[0].is_builtin, entry)):
        try:
            yield package, reference, read_packaged(reference, package.name, checks)
        except ConfigError as error:
            yield package, reference, Problem(str(package), f"tuning table {reference}: {error}")


def package_tables(
    registry: Registry, checks: Mapping[str, Check] | None = None
) -> tuple[TuningTable, tuple[Problem, ...]]:
    """Return the entries of all packages, and a problem for each table that cannot be used."""
    found = [each for _, _, each in each_table(registry, checks)]
    tables = [each for each in found if isinstance(each, TuningTable)]
    return merged(tables), tuple(each for each in found if isinstance(each, Problem))
