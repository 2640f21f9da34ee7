"""Files: what is at an untrusted path, whether a name stays in its folder, JSON, atomic writes. Imports no torch."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal

from dovetail.core.errors import ConfigError, shown


def path_kind(path: str | Path) -> Literal["folder", "file", "none"]:
    """Return what is at a path, with ~ expanded and links followed. Raises ConfigError for a path that the operating
    system refuses, for instance for its length, and for a pipe or device: reading one may never end."""
    try:
        path = Path(path).expanduser()
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "none"
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{shown(Path(path))}: cannot be opened ({reason})") from None
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise ConfigError(f"{shown(path)}: is a pipe, socket or device. Replace it with a regular file")
    return "folder" if stat.S_ISDIR(mode) else "file"


def is_inside(name: str) -> bool:
    """Whether a name from a file or the command line stays inside its folder, on any operating system. Symbolic links
    inside the folder are trusted, because download caches consist of them."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    outside = posix.is_absolute() or windows.drive or windows.root or ".." in (*posix.parts, *windows.parts)
    return bool(name) and not outside


_POINTER = "version https://git-lfs.github.com/"
"""Beginning of a pointer of Git LFS, which a clone without LFS has in place of a large file."""


def refuse_pointer(file: Path) -> None:
    """Raise ConfigError if the file is a pointer of Git LFS."""
    try:
        with file.open("rb") as stream:
            found = stream.read(len(_POINTER)) == _POINTER.encode()
    except OSError:
        return
    if found:
        raise ConfigError(f"{shown(file)}: is a Git LFS pointer, not the file. Run `git lfs pull` in its folder")


def read_text(file: Path) -> str:
    """Read a text in UTF-8. Raises ConfigError for anything else."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown(file)}: cannot be read as text ({shown(error)})") from None
    if text.startswith(_POINTER):
        refuse_pointer(file)
    return text


def parse_json(text: str, where: str) -> Any:
    """Return the value of a JSON text. Raises ConfigError for anything else. `where`: its place, for messages."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: cannot be read as JSON ({shown(error)})") from None


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Return a JSON object, like `parse_json`."""
    content = parse_json(text, where)
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: holds {type(content).__name__}, not an object")
    return content


def read_object(file: Path) -> dict[str, Any]:
    """Read a file with a JSON object. Raises ConfigError for anything else."""
    return parse_object(read_text(file), str(shown(file)))


def write_file(path: Path, text: str) -> None:
    """Replace a file atomically: a reader finds the previous content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
