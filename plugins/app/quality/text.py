"""Windows of held-out text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.core.errors import ConfigError
from dovetail.core.held_out import held_out_texts, read_text

if TYPE_CHECKING:
    from dovetail.core.tokenizer import Tokenizer
    from dovetail.plugins.app.quality.config import QualityConfig

Ids = tuple[int, ...]


def documents(config: QualityConfig) -> list[str]:
    """Return the texts. Raises ConfigError if they cannot be read."""
    if config.text is not None:
        return [read_text(Path(config.text), f"quality.text={config.text}")]
    return held_out_texts("quality.text is not set, and the default text")


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
