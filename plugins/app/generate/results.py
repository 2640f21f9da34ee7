"""Results of app=generate in a file: each is written as it completes, and the output appears when all are there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from dovetail.core.compose.wording import listing, show
from dovetail.core.errors import ConfigError

SUFFIX = ".partial"
_UNFINISHED = "unfinished_output_of"
"""First key of an unfinished file; its first line has the settings of the run."""


class ResultFile:
    """Writes records to `<output>.partial` in the order of completion. `finish` puts them into the order of the
    prompts and renames them to the output; until then a former output remains.

    Raises ConfigError if the output is not a former one of this app, or if it has an unfinished one and `resume` is
    None."""

    def __init__(
        self,
        output: str,
        prompts: Sequence[str],
        settings: Mapping[str, Any],
        *,
        source: str | None = None,
        resume: bool | None = None,
    ) -> None:
        """source: file of the prompts. resume: continue (True) or discard (False) the records of an unfinished run.
        settings: what the records depend on; a run with others cannot be continued."""
        self.name = f"generate.output={output}"
        self.output = Path(output).expanduser().resolve()
        self.partial = self.output.with_name(self.output.name + SUFFIX)
        self._records: dict[int, tuple[int, int]] = {}
        """Index of a prompt -> (offset, length) of its record in the unfinished file."""
        if source is not None and Path(source).resolve() in (self.output, self.partial):
            raise ConfigError(f"{self.name} is the file of the prompts: choose another name")
        header = {_UNFINISHED: "app=generate", "settings": dict(settings)}
        try:
            self._refuse_other_files()
            lines = self._unfinished_lines() if resume is not False else []
            if len(lines) > 1:
                if resume is None:
                    raise ConfigError(
                        f"{self.partial} has {len(lines) - 1} results of a run that did not end: "
                        "generate.resume=true continues it, generate.resume=false discards it"
                    )
                self._take_over(lines, header, prompts)
                self._file: IO[bytes] = self.partial.open("r+b")
                self._file.truncate(sum(map(len, lines)))  # drops a record that was cut off
                self._file.seek(0, os.SEEK_END)
            else:
                self._file = self.partial.open("wb")
                self._append(header)
        except OSError as error:
            raise ConfigError(f"{self.name}: cannot be written ({error})") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):  # a full disk, which `write` has reported
            self._file.close()
        if not self._records:
            self.partial.unlink(missing_ok=True)

    @property
    def done(self) -> frozenset[int]:
        """Indices of the prompts whose records are written."""
        return frozenset(self._records)

    def write(self, index: int, record: Mapping[str, Any]) -> None:
        """Write the record of the prompt with this index."""
        try:
            self._records[index] = self._append({"index": index, **record})
        except OSError as error:
            raise ConfigError(f"{self.name}: cannot be written ({error})") from None

    def finish(self) -> None:
        """Make the records the output, in the order of the prompts."""
        ordered = self.output.with_name(self.output.name + ".ordered")
        try:
            with self.partial.open("rb") as source, ordered.open("wb") as target:
                for _, (start, length) in sorted(self._records.items()):
                    source.seek(start)
                    target.write(source.read(length))
                target.flush()
                os.fsync(target.fileno())
            ordered.replace(self.output)
        except OSError as error:
            with suppress(OSError):
                ordered.unlink(missing_ok=True)
            raise ConfigError(f"{self.name}: cannot be written ({error})") from None
        self.discard()

    def discard(self) -> None:
        """Forget the records, so that the unfinished file is removed at the end."""
        self._records.clear()

    def _append(self, record: Mapping[str, Any]) -> tuple[int, int]:
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        start = self._file.tell()
        self._file.write(line)
        self._file.flush()
        return start, len(line)

    def _refuse_other_files(self) -> None:
        """Raise ConfigError if the output exists and is not a former output."""
        if not self.output.exists():
            return
        if not self.output.is_file():
            raise ConfigError(f"{self.name} is not a regular file, and the results are written by renaming one")
        with self.output.open("rb") as file:
            first = file.readline()
        record = _object(first)
        if first and not ("prompt" in record and {"completions", "error"} & record.keys()):
            raise ConfigError(f"{self.name} exists and is not an output of app=generate: choose another name")

    def _unfinished_lines(self) -> list[bytes]:
        """Return the whole lines of the unfinished file: its header and records."""
        if not self.partial.exists():
            return []
        text = self.partial.read_bytes()
        if text and not text.startswith(f'{{"{_UNFINISHED}"'.encode()):
            raise ConfigError(f"{self.partial} exists and is not an unfinished output of app=generate: remove it")
        return [line + b"\n" for line in text.split(b"\n")[:-1]]

    def _take_over(self, lines: Sequence[bytes], header: Mapping[str, Any], prompts: Sequence[str]) -> None:
        """Take over the records of an unfinished run. Raises ConfigError if it had other settings or prompts."""
        before, now = _object(lines[0])["settings"], json.loads(json.dumps(header["settings"]))
        keys = [key for key in before | now if before.get(key) != now.get(key)]
        changed = [f"{key}={show(before.get(key))} (now {show(now.get(key))})" for key in keys]
        if changed:
            raise ConfigError(
                f"{self.partial} was made with {listing(changed)}: "
                "repeat its settings to continue it, or discard it with generate.resume=false"
            )
        start = len(lines[0])
        for line in lines[1:]:
            record = _object(line)
            index = record.get("index")
            if not (isinstance(index, int) and index < len(prompts) and record.get("prompt") == prompts[index]):
                raise ConfigError(
                    f"{self.partial}: its record {index} is not of these prompts: "
                    "repeat its prompts to continue it, or discard it with generate.resume=false"
                )
            self._records[index] = start, len(line)
            start += len(line)


def _object(line: bytes) -> dict[str, Any]:
    """Return the JSON object in a line; empty if there is none."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
