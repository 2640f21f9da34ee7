"""Prompts of app=generate: words of the command line, a file or stdin."""

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
        return [_checked(word, f"prompt {number} after `--`") for number, word in enumerate(words, 1)]
    if source is None:
        return [DEFAULT]
    try:
        if source == "-":
            return [_checked(sys.stdin.read(), "the prompt on stdin")]
        # Decoded from bytes: text mode would split at a lone carriage return.
        text = Path(source).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"generate.prompts={source}: cannot be read ({error})") from None
    read = _from_json if source.endswith(".jsonl") else _checked
    lines = [(number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"generate.prompts={source}: the file has no prompt")
    return [read(line, f"{source}:{number}") for number, line in lines]


def _from_json(line: str, where: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{where}: not an object with "prompt" ({type(error).__name__}: {error})') from None
    if not isinstance(prompt, str):
        raise ConfigError(f'{where}: "prompt" is {type(prompt).__name__}, not text')
    return _checked(prompt, where)


def _checked(prompt: str, where: str) -> str:
    if not prompt:
        raise ConfigError(f"{where}: a prompt is empty: every prompt needs at least one character")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        at = f"character {error.start} is {prompt[error.start]!a}"
        raise ConfigError(f"{where}: a prompt is not valid Unicode: {at}, half of a surrogate pair") from None
    return prompt
