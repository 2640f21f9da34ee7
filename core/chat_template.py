"""Chat templates: render messages into the model's prompt format, in transformers' Jinja sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.core.checkpoint import load_json
from dovetail.core.errors import ConfigError, RequestError


class ChatTemplate:
    """Renders one chat template. Thread-safe."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """`special`: variables that the template may use, such as bos_token."""
        self.source, self._special = source, dict(special)

    @classmethod
    def load(cls, folder: Path, file: Path | None = None) -> ChatTemplate | None:
        """Load `file`, else the folder's chat_template.jinja or tokenizer_config.json; None without any template."""
        config = _tokenizer_config(folder)
        special = {name: _text(token) for name, token in config.items() if name.endswith("_token") and _text(token)}
        if file is not None:
            try:
                return cls(file.read_text(encoding="utf-8"), special)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"chat template {file}: cannot be read ({error})") from None
        if (template := folder / "chat_template.jinja").is_file():
            return cls(template.read_text(encoding="utf-8"), special)
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
        """Render the prompt in milliseconds; the first call takes seconds. Raises RequestError for refused messages."""
        # Imported here because it takes a second (see warm).
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
    """Import the rendering libraries ahead of time, which takes a second, so that no request waits for it."""
    import transformers.utils.chat_template_utils  # noqa: F401


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    config = load_json(file) if file.is_file() else {}
    return config if isinstance(config, dict) else {}


def _text(token: object) -> str:
    """Return the text of a special token, which is a string or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
