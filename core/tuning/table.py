"""Tables of measured choices as JSON files. The files are untrusted, so every value is checked where it is read.

    {"schema": "dovetail.tuning/1", "gpus": {"NVIDIA H200": {"capability": "9.0", "processors": 132}}, "entries": [
    {"op": "matmul", "gpu": "NVIDIA H200", "key": {"weight": "fp8", ...},
     "rows": {"16": {"tokens": 16, ...}, "64": null}}
    ]}

A choice serves up to its number of rows; null is the operation's default, which also serves more rows than any entry.
`gpus` may be missing. It has the facts of GPU models, by which another model can be found to be alike. This module
does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.core.errors import ConfigError, shown
from dovetail.core.interfaces.tuning import Choice, Key, Value, make_key

SCHEMA = "dovetail.tuning/1"
MOST_BYTES = 64 << 20
"""Size limit of a table's file."""
MOST_ROWS = 1 << 20

Check = Callable[[Key, int, Choice], None]
"""check(key, rows, choice) raises ValueError for a choice that the operation cannot run."""


class Subject(NamedTuple):
    """Identity of an entry."""

    op: str
    gpu: str
    """Name of the GPU model, as CUDA reports it."""
    key: Key


class GpuFacts(NamedTuple):
    """Facts on which the best choices depend most. Models that have the same are alike."""

    capability: str
    """Compute capability, such as "9.0"."""
    processors: int
    """Streaming multiprocessors (SMs)."""


@dataclass(frozen=True, slots=True)
class TuningTable:
    """Choices by subject and maximum number of rows, in ascending order of rows."""

    entries: Mapping[Subject, Mapping[int, Choice | None]] = field(default_factory=dict)
    origins: Mapping[tuple[Subject, int], str] = field(default_factory=dict)
    """Source of each entry, for reports: "cache", "search", "model", a package or a file."""
    gpus: Mapping[str, GpuFacts] = field(default_factory=dict)
    """Facts of GPU models by name, as far as they are known."""

    def __len__(self) -> int:
        return sum(map(len, self.entries.values()))

    @classmethod
    def of(
        cls,
        choices: Mapping[tuple[Subject, int], Choice | None],
        origin: str,
        gpus: Mapping[str, GpuFacts] | None = None,
    ) -> TuningTable:
        entries: dict[Subject, dict[int, Choice | None]] = {}
        for subject, rows in sorted(choices, key=_order):
            entries.setdefault(subject, {})[rows] = choices[subject, rows]
        return cls(entries, dict.fromkeys(choices, origin), gpus or {})

    def flat(self) -> dict[tuple[Subject, int], Choice | None]:
        return {(subject, most): choice for subject, rows in self.entries.items() for most, choice in rows.items()}

    def for_gpu(self, gpu: str) -> TuningTable:
        """Return the entries of one GPU model."""
        entries = {subject: rows for subject, rows in self.entries.items() if subject.gpu == gpu}
        origins = {at: origin for at, origin in self.origins.items() if at[0].gpu == gpu}
        return TuningTable(entries, origins, self.gpus)

    def for_alike(self, gpu: str, facts: GpuFacts) -> TuningTable:
        """Return the entries of other GPU models with the same facts, as entries of this one. Of several models alike,
        the first by name serves a key."""
        found: dict[Subject, tuple[str, Mapping[int, Choice | None]]] = {}
        for subject in sorted(self.entries, key=lambda subject: subject.gpu):
            if subject.gpu != gpu and self.gpus.get(subject.gpu) == facts:
                found.setdefault(subject._replace(gpu=gpu), (subject.gpu, self.entries[subject]))
        entries = {subject: rows for subject, (_, rows) in found.items()}
        return TuningTable(entries, {(one, most): other for one, (other, rows) in found.items() for most in rows})

    def without(self, origin: str) -> TuningTable:
        """Return the entries that have another origin."""
        kept = {at: choice for at, choice in self.flat().items() if self.origins[at] != origin}
        return TuningTable(TuningTable.of(kept, "").entries, {at: self.origins[at] for at in kept}, self.gpus)

    def counts(self) -> dict[str, int]:
        """Return the number of entries by origin."""
        found: dict[str, int] = {}
        for origin in self.origins.values():
            found[origin] = found.get(origin, 0) + 1
        return dict(sorted(found.items()))

    def hash(self) -> str:
        """Digest of the entries: equal for tables that make the same choices. Origins and order do not count."""
        lines = sorted(json.dumps(entry, sort_keys=True) for entry in self._as_json())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def text(self) -> str:
        """Return the file's content, one subject per line."""
        lines = ",\n".join(map(json.dumps, self._as_json()))
        gpus = {name: facts._asdict() for name, facts in sorted(self.gpus.items())}
        known = f'"gpus": {json.dumps(gpus)}, ' if gpus else ""
        return f'{{"schema": {json.dumps(SCHEMA)}, {known}"entries": [\n{lines}\n]}}\n'

    def _as_json(self) -> list[dict[str, Any]]:
        ordered = sorted(self.entries, key=lambda subject: _order((subject, 0)))
        return [
            {
                "op": subject.op,
                "gpu": subject.gpu,
                "key": dict(subject.key),
                "rows": {
                    str(most): None if choice is None else dict(choice)
                    for most, choice in self.entries[subject].items()
                },
            }
            for subject in ordered
        ]


def merged(tables: Iterable[TuningTable]) -> TuningTable:
    """Return all entries of the tables. Where several have the same subject and rows, the first one's applies."""
    choices: dict[tuple[Subject, int], Choice | None] = {}
    origins: dict[tuple[Subject, int], str] = {}
    gpus: dict[str, GpuFacts] = {}
    for table in tables:
        gpus = {**table.gpus, **gpus}
        for at, choice in table.flat().items():
            if at not in choices:
                choices[at], origins[at] = choice, table.origins[at]
    return TuningTable(TuningTable.of(choices, "").entries, origins, gpus)


# Reading.


def read_table(path: Path, origin: str, checks: Mapping[str, Check] | None = None) -> TuningTable:
    """Read a table, or raise ConfigError naming the file and what is wrong with it. `checks`: by operation; choices of
    other operations are only checked to be flat objects."""
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(MOST_BYTES + 1)  # A device may have no end.
        if len(data) > MOST_BYTES:
            raise ConfigError(f"{shown(path)}: a tuning table has at most {MOST_BYTES >> 20} MiB")
        text = data.decode()
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise ConfigError(f"{shown(path)}: cannot be read ({shown(error)})") from None
    return parse_table(text, str(path), origin, checks)


def parse_table(text: str, where: str, origin: str, checks: Mapping[str, Check] | None = None) -> TuningTable:
    """Return the table with this content. `where` names its file in errors."""
    try:
        content = _json(text)
        return TuningTable.of(_entries(content, checks or {}), origin, _gpus(content.get("gpus", {})))
    except ValueError as error:
        raise ConfigError(f"{shown(Path(where))}: not a tuning table: {shown(error)}") from None


def _json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"it has the number {name}")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON, or was cut off ({error})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _entries(content: Any, checks: Mapping[str, Check]) -> dict[tuple[Subject, int], Choice | None]:
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ValueError(f'its schema is {shown(schema)}; this version reads "{SCHEMA}"')
    _fields(content, "the table", ("schema", "entries"), optional=("gpus",))
    if not isinstance(content["entries"], list):
        raise ValueError("`entries` is not a list")
    found: dict[tuple[Subject, int], Choice | None] = {}
    for number, entry in enumerate(content["entries"], 1):
        try:
            for at, choice in _entry(entry, checks).items():
                if at in found:
                    raise ValueError(f"{at[1]} rows occur twice")
                found[at] = choice
        except ValueError as error:
            raise ValueError(f"entry {number}: {error}") from None
    return found


def _entry(entry: Any, checks: Mapping[str, Check]) -> dict[tuple[Subject, int], Choice | None]:
    _fields(entry, "it", ("op", "gpu", "key", "rows"))
    for name in ("op", "gpu"):
        if not isinstance(entry[name], str) or not entry[name]:
            raise ValueError(f"`{name}` is {shown(entry[name])}, not a name")
    subject = Subject(entry["op"], entry["gpu"], make_key(**flat_values(entry["key"], "key")))
    if not isinstance(entry["rows"], dict):
        raise ValueError("`rows` is not an object")
    found: dict[tuple[Subject, int], Choice | None] = {}
    for text, choice in entry["rows"].items():
        if not (text.isascii() and text.isdigit() and not text.startswith("0") and len(text) < 8):
            raise ValueError(f"{shown(text)} is not a number of rows")
        rows = int(text)
        if rows > MOST_ROWS:
            raise ValueError(f"{rows} rows are more than {MOST_ROWS}")
        if choice is not None:
            choice = flat_values(choice, f"the choice for {rows} rows")
            if subject.op in checks:
                try:
                    checks[subject.op](subject.key, rows, choice)
                except (ValueError, ArithmeticError) as error:
                    raise ValueError(f"the choice for {rows} rows: {error}") from None
                except TypeError:
                    raise ValueError(f"the choice for {rows} rows, or its key, has a value of another type") from None
        found[subject, rows] = choice
    return found


def _gpus(content: Any) -> dict[str, GpuFacts]:
    if not isinstance(content, dict):
        raise ValueError("`gpus` is not an object")
    found = {}
    for name, facts in content.items():
        _fields(facts, f"the GPU {shown(name)}", GpuFacts._fields)
        capability, processors = facts["capability"], facts["processors"]
        if not isinstance(capability, str):
            raise ValueError(f"the capability of {shown(name)} is {shown(capability)}, not text such as 9.0")
        if not isinstance(processors, int) or isinstance(processors, bool) or processors < 1:
            raise ValueError(f"{shown(name)} has {shown(processors)} processors, which is not a whole number from 1 on")
        found[name] = GpuFacts(capability, processors)
    return found


def _fields(value: Any, what: str, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    for name in value:
        if name not in names + optional:
            raise ValueError(f"{what} has an unknown field {shown(name)}; fields are {', '.join(names + optional)}")
    if missing := [name for name in names if name not in value]:
        raise ValueError(f"{what} lacks {', '.join(missing)}")


def flat_values(value: Any, what: str) -> dict[str, Value]:
    """Return a JSON value that must be an object of plain values, or raise ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    for name, item in value.items():
        if not isinstance(item, str | int | float) or (isinstance(item, float) and not math.isfinite(item)):
            raise ValueError(f"{what} has {shown(name)}: {shown(item)}, not text, a number or true or false")
    return value


def _order(at: tuple[Subject, int]) -> tuple[str, str, str, int]:
    subject, rows = at
    # Values of one name may differ in type.
    return subject.op, subject.gpu, json.dumps(subject.key), rows
