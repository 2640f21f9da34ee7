"""Special tokens that a checkpoint states beside its tokenizer.json, and those that surround a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.core.interfaces import Checkpoint

FILE = "tokenizer_config.json"
_SURROUNDING = {
    "LlamaTokenizer": True,
    "CodeLlamaTokenizer": True,
    "GemmaTokenizer": True,
    "CohereTokenizer": True,
    "GPTNeoXTokenizer": False,
}
"""Classes of transformers 4 that decide themselves which special tokens surround a text, whatever tokenizer.json
states -> whether add_bos_token is true if the file lacks it."""


def tokenizer_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return tokenizer_config.json, and in it the special tokens of special_tokens_map.json if it is older than
    transformers 4.34; {} without the files. Raises ConfigError for a file that cannot be read."""
    config = checkpoint.json(FILE) or {}
    if "added_tokens_decoder" not in config:
        # Later files state all special tokens here, and the other file repeats them.
        config = {**config, **(checkpoint.json("special_tokens_map.json") or {})}
    return config


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens in a tokenizer_config.json by name, such as bos_token."""
    return {name: text for name, token in config.items() if name.endswith("_token") and (text := _text(token))}


def surrounding(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the special tokens before and after a text, "" for none; None = tokenizer.json says it.

    DeepSeek's files, for instance, name LlamaTokenizerFast, whose BOS their tokenizer.json lacks."""
    leads = _SURROUNDING.get(str(config.get("tokenizer_class", "")).removesuffix("Fast"))
    if leads is None:
        return None
    texts, found = special_tokens(config), []
    for name, default in (("bos", leads), ("eos", False)):
        adds = config.get(f"add_{name}_token", default)
        if adds and f"{name}_token" not in texts:
            return None
        found.append(texts[f"{name}_token"] if adds else "")
    return found[0], found[1]


def _text(token: object) -> str:
    """Return the text of a special token, which is a string or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
