"""Text of requests: chat templates and tokenization, in threads off the event loop."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dovetail.core.chat_template import ChatTemplate
from dovetail.core.errors import ConfigError, RequestError
from dovetail.core.frontend.fleet import Fleet
from dovetail.core.tokenizer import Tokenizer
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.errors import FieldError
from dovetail.plugins.app.serve.schemas import Message, Prompts

_THREADS = 4
_INLINE_CHARACTERS = 256
"""Length up to which tokenizing takes less time than waking a thread."""
_MAX_DENSITY = 8
"""Characters per token that few texts exceed."""
_CUT_MARGIN = 64
"""Number of tokens by which a truncated text may differ from the same text within the whole."""
_TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text")


class Texts:
    """Tokenizer and chat template of the model. Used only in the event loop."""

    def __init__(self, config: ServeConfig, client: Fleet) -> None:
        self.config, self.client = config, client
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="dovetail-text")
        if config.chat_template is not None and not Path(config.chat_template).expanduser().is_file():
            raise ConfigError(f"serve.chat_template={config.chat_template}: no such file")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.client.tokenizer

    async def encode(self, text: str, *, special: bool = True, param: str = "prompt") -> list[int]:
        tokenizer, limit = self.tokenizer, self.client.info.max_len
        if len(text) > _MAX_DENSITY * limit:
            # It hardly fits; checking its beginning costs a fraction of tokenizing the whole text.
            beginning = await self.threaded(tokenizer.encode, text[: _MAX_DENSITY * limit], special=special)
            if len(beginning) > limit + _CUT_MARGIN:
                raise too_long(f"more than {limit}", limit, param)
        if len(text) <= _INLINE_CHARACTERS:
            ids = tokenizer.encode(text, special=special)
        else:
            ids = await self.threaded(tokenizer.encode, text, special=special)
        if not ids:
            raise FieldError(f"{param}: empty, and this model has no BOS token", param)
        return ids

    async def threaded(self, function: Any, *arguments: Any, **named: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(*arguments, **named))

    async def render(self, messages: Sequence[Message], variables: Mapping[str, Any] = MappingProxyType({})) -> str:
        """Render messages with the model's chat template."""
        return await self.threaded(self._render, [plain(message) for message in messages], variables)

    def _render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        if self._template is None:
            raise RequestError(
                f"the model {self.client.info.model} has no chat template: use /v1/completions, or start the server "
                "with serve.chat_template=FILE"
            )
        return self._template.render(messages, **variables)

    @functools.cached_property
    def _template(self) -> ChatTemplate | None:
        folder, file = self.client.info.folder, self.config.chat_template
        if folder is None and file is None:
            return None
        return ChatTemplate.load(Path(folder or "."), None if file is None else Path(file).expanduser())

    @property
    def template(self) -> str:
        """Source of the chat template."""
        return "" if self._template is None else self._template.source

    async def prompts(self, given: Prompts, param: str) -> list[Sequence[int]]:
        """Return one or several prompts, each as token ids."""
        one = isinstance(given, str) or isinstance(given[0], int)
        many: list[Any] = [given] if one else list(given)
        if len(many) > self.config.max_prompts:
            raise FieldError(f"{param}: {len(many)} prompts, but at most {self.config.max_prompts} are allowed", param)
        return [await self.encode(text, param=param) if isinstance(text, str) else text for text in many]


def too_long(tokens: str, limit: int, param: str) -> FieldError:
    # Clients recognise the first sentence, which is OpenAI's.
    return FieldError(
        f"This model's maximum context length is {limit} tokens (engine.max_len). However, the prompt has {tokens} "
        "tokens: shorten it",
        param,
        code="context_length_exceeded",
    )


def plain(message: Message) -> dict[str, Any]:
    """Return a message as chat templates expect it, with its content as text."""
    found = message.model_dump(exclude_none=True)
    role = "system" if message.role == "developer" else message.role
    for call in found.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return {**found, "role": role, "content": text_of(message.content)}


def _arguments(text: str) -> Any:
    """Parse arguments, since templates encode them as JSON themselves. Invalid JSON stays text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def text_of(content: Any, param: str = "messages") -> str:
    """Return the text of a message's content. Raises FieldError if a part is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in _TEXT_PARTS or part.text is None:
            raise FieldError(f"a content part of type {part.type!r}: this server reads only text", param)
    return "\n".join(part.text for part in content)
