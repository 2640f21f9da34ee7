"""Collect the prompts of `app=generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dovetail.core.errors import ConfigError

DEFAULT = "def read_json(path):\n    with open(path) as f:\n"
"""Default prompt; Python, since the bundled model is trained on it."""


def gather(words: Sequence[str], source: str | None) -> list[str]:
    """Return the prompts: the arguments after `--`, else the file, else stdin for "-", else the default."""
    if words and source:
        raise ConfigError(f"prompts come after `--` or from generate.prompts={source}, not from both")
    if words:
        prompts = list(words)
    elif source is None:
        prompts = [DEFAULT]
    elif source == "-":
        prompts = [sys.stdin.read()]
    else:
        prompts = _read(Path(source))
    if not prompts or not all(prompts):
        raise ConfigError("a prompt is empty: every prompt needs at least one character")
    return prompts


def _read(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"generate.prompts={file}: cannot be read ({error})") from None
    lines = [line for line in lines if line.strip()]
    return [_from_json(line, file, i) for i, line in enumerate(lines, 1)] if file.suffix == ".jsonl" else lines


def _from_json(line: str, file: Path, number: int) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{file}:{number}: not an object with "prompt" ({type(error).__name__}: {error})') from None
    if not isinstance(prompt, str):
        raise ConfigError(f'{file}:{number}: "prompt" is {type(prompt).__name__}, not text')
    return prompt
