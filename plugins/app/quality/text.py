"""Windows of held-out text."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.core.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.core.tokenizer import Tokenizer
    from dovetail.plugins.app.quality.config import QualityConfig

Ids = tuple[int, ...]

HELD_OUT = (
    "bz2.py", "contextlib.py", "ctypes/util.py", "filecmp.py", "functools.py", "multiprocessing/resource_tracker.py",
    "multiprocessing/synchronize.py", "unittest/suite.py", "xml/dom/xmlbuilder.py", "zipimport.py",
    "zoneinfo/_tzpath.py",
)  # fmt: skip
"""Modules of the held-out set of examples/train_tiny, without tests, which not every installation has. Their sources
depend on the Python version."""


def documents(config: QualityConfig) -> list[str]:
    """Return the texts. Raises ConfigError if they cannot be read."""
    if config.text is not None:
        return [_read(Path(config.text), f"quality.text={config.text}")]
    folder = Path(sysconfig.get_path("stdlib"))
    return [_read(folder / name, "quality.text is not set, and the default text") for name in HELD_OUT]


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} cannot be read ({error})") from None


def windows(config: QualityConfig, texts: Sequence[str], tokenizer: Tokenizer) -> list[Ids]:
    """Return different windows of `config.length` tokens. Each begins as the tokenizer begins a text, usually with BOS,
    in addition to its length."""
    found: dict[Ids, None] = {}
    for text in texts:
        begin = tuple(takewhile(tokenizer.is_special, tokenizer.encode(text)))
        ids = tokenizer.encode(text, special=False)
        for end in range(config.length, len(ids) + 1, config.length):
            found[*begin, *ids[end - config.length : end]] = None
    if len(found) < config.windows:
        raise ConfigError(
            f"quality.windows={config.windows}: the text has only {len(found)} different windows of quality.length="
            f"{config.length} tokens: lower one of them, or give a longer quality.text"
        )
    chosen = sorted(random.Random(config.seed).sample(range(len(found)), config.windows))
    every = list(found)
    return [every[i] for i in chosen]
