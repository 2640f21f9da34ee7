"""Chat templates: messages to the prompt that the model was trained on. Rendered in transformers' Jinja sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.core.errors import ConfigError, RequestError


class ChatTemplate:
    """Thread-safe."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """`special`: what the template may name, bos_token and the like."""
        self.source, self._special = source, dict(special)

    @classmethod
    def load(cls, folder: Path, file: Path | None = None) -> ChatTemplate | None:
        """The one in `file`, else the model folder's own: chat_template.jinja, or in tokenizer_config.json. None where
        there is none."""
        config = _tokenizer_config(folder)
        special = {name: _text(token) for name, token in config.items() if name.endswith("_token") and _text(token)}
        if file is not None:
            try:
                return cls(file.read_text(encoding="utf-8"), special)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"chat template {file}: cannot be read ({error})") from None
        if (beside := folder / "chat_template.jinja").is_file():
            return cls(beside.read_text(encoding="utf-8"), special)
        stated = config.get("chat_template")
        if isinstance(stated, list):
            named = {entry["name"]: entry["template"] for entry in stated}
            stated = named.get("default")
        return cls(stated, special) if isinstance(stated, str) else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Takes milliseconds, the first time seconds. Raises RequestError for what the template refuses."""
        # Imported here: it takes a second (see warm).
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, _ = render_jinja_template(
                [list(messages)],
                tools=None if tools is None else list(tools),
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **{**self._special, **variables},
            )
        except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from None
        return str(rendered[0])


def warm() -> None:
    """Import what rendering needs: a second that no request has to wait for."""
    import transformers.utils.chat_template_utils  # noqa: F401


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error})") from None
    return config if isinstance(config, dict) else {}


def _text(token: object) -> str:
    """Written as a string, or as an object that holds it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
