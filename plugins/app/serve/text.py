"""Text of requests: tokenization in threads off the event loop, chat templates in a separate process."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dovetail.core.chat_template import TRIAL, ChatTemplate, Renderer
from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.errors import ConfigError, DovetailError, RequestError
from dovetail.core.frontend.fleet import Fleet
from dovetail.core.tokenizer import Tokenizer
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.errors import FieldError, ServerError
from dovetail.plugins.app.serve.lanes import Lane
from dovetail.plugins.app.serve.schemas import Message, Prompts

log = logging.getLogger(__name__)

_THREADS = 2
"""Threads of a lane."""
_INLINE_CHARACTERS = 256
"""Length up to which tokenizing takes less time than waking a thread."""
_INLINE_SECONDS = 0.05
"""Time of one tokenization in the event loop after which all others use threads."""
_SHORT_CHARACTERS = 16 << 10
"""Maximum length of a text in the lane of short ones, which thus never wait for megabytes."""
_MAX_DENSITY = 8
"""Characters per token that few texts exceed."""
_CUT_MARGIN = 64
"""Number of tokens by which a truncated text may differ from the same text within the whole."""
_QUEUE_FACTOR = 2
"""A request waits for others at most this multiple of serve.template_timeout before its template is rendered."""
_TRIAL_TEXT = "".join(char * 64 for char in "aA1 .\n")
"""Text with runs of characters, on which regular expressions that backtrack too often fail."""
_TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text")


class Texts:
    """Tokenizer and chat template of the model. Used only in the event loop."""

    def __init__(self, config: ServeConfig, client: Fleet) -> None:
        self.config, self.client = config, client
        self._file = None if config.chat_template is None else Path(config.chat_template).expanduser()
        if self._file is not None:
            if not self._file.is_file():
                raise ConfigError(f"serve.chat_template={config.chat_template}: no such file")
            ChatTemplate.load(None, self._file)
        self._inline = _INLINE_CHARACTERS
        self._short, self._long = Lane(_THREADS, "text"), Lane(_THREADS, "long-text")
        self._rendering, self._renderer = Lane(1, "template"), Renderer(config.template_timeout)
        self._rendered = 0.0
        """Seconds spent on rendering. Written by the lane's thread."""

    def close(self) -> None:
        self._renderer.process.close()
        for lane in (self._short, self._long, self._rendering):
            lane.close()

    async def prepare(self, report: bool = True) -> None:
        """Start the process that renders. Once an engine is ready, try tokenizer and template; `report`: log why they
        fail."""
        try:
            await self._rendering.run(self._renderer.process.start)
            await self.client.wait_ready()
        except DovetailError as error:
            log.debug("the text of requests is not tried: %s", error)
            return
        for what, trial in (("tokenizer", self._try_tokenizer), ("chat template", self._try_template)):
            try:
                await trial()
            except (DovetailError, ServerError) as error:
                if report:
                    log.warning("%s: fails in a trial, so requests may be refused: %s", what, error)

    async def _try_tokenizer(self) -> None:
        try:
            _ = self.tokenizer
        except RequestError:
            if self.client.info.checkpoint is None:
                return  # Random weights have no text.
            raise
        await self.tokenize(_TRIAL_TEXT)

    async def _try_template(self) -> None:
        if await self._short.run(lambda: self._template) is not None:
            await self._rendering.run(self._render, list(TRIAL), {}, self._rendered)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.client.tokenizer

    async def encode(self, text: str, *, special: bool = True, param: str = "prompt") -> list[int]:
        limit = self.client.info.max_len
        beginning = _MAX_DENSITY * limit
        while len(text) > beginning:
            # It hardly fits. Its beginning shows that for a fraction of the work, at any ratio of characters to tokens.
            if len(await self.tokenize(text[:beginning], special=special)) > limit + _CUT_MARGIN:
                raise too_long(f"more than {limit}", limit, param)
            beginning *= 2
        ids = await self.tokenize(text, special=special)
        if not ids:
            raise FieldError(f"{param}: empty, and this model has no BOS token", param)
        return ids

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Tokenize a text of any length."""
        tokenizer = self.tokenizer
        if len(text) > self._inline:
            lane = self._short if len(text) <= _SHORT_CHARACTERS else self._long
            return await lane.run(tokenizer.encode, text, special=special)
        began = time.perf_counter()
        try:
            return tokenizer.encode(text, special=special)
        finally:
            if time.perf_counter() - began > _INLINE_SECONDS:
                self._inline = 0

    async def threaded(self, function: Any, *arguments: Any, **named: Any) -> Any:
        return await self._short.run(function, *arguments, **named)

    async def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        param: str = "messages",
    ) -> str:
        """Render messages with the model's chat template. `param`: the field that has them."""
        if len(messages) > (limit := self.client.info.max_len):
            # A template writes a token and more for each of them.
            raise too_long(f"at least {len(messages)}", limit, param)
        plain_messages = [plain(message) for message in messages]
        return await self._rendering.run(self._render, plain_messages, variables, self._rendered)

    def _render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any], rendered: float) -> str:
        """Render in the thread of the lane. `rendered`: seconds spent on rendering when the request was queued."""
        try:
            template = self._template
        except ConfigError as error:
            # Clients see the message, and where the checkpoint is concerns the operator alone.
            path = Path(self.client.info.checkpoint or "")
            reason = str(error).replace(f"{path}/", "").replace(f"{path.parent}/", "")
            raise RequestError(f"this model's chat template cannot be used: {reason}") from None
        if template is None:
            raise RequestError(
                f"the model {self.client.info.model} has no chat template: use /v1/completions, or start the server "
                "with serve.chat_template=FILE"
            )
        began, limit = time.perf_counter(), _QUEUE_FACTOR * self.config.template_timeout
        if self._rendered - rendered > limit:
            raise ServerError(
                503,
                f"the chat templates of earlier requests took more than {limit:g} s: try again later",
                code="template_queue",
                retry_after=1,
            )
        try:
            return self._renderer.render(template, messages, **variables)
        finally:
            self._rendered += time.perf_counter() - began

    @functools.cached_property
    def _template(self) -> ChatTemplate | None:
        path = self.client.info.checkpoint
        return ChatTemplate.load(None if path is None else open_checkpoint(path), self._file)

    def template(self, tools: object) -> str:
        """Return the source of the chat template of a conversation with these tools; None = it has none."""
        return "" if self._template is None else self._template.chosen(tools)

    async def prompts(self, given: Prompts, param: str) -> list[Sequence[int]]:
        """Return one or several prompts, each as token ids."""
        one = isinstance(given, str) or isinstance(given[0], int)
        many: list[Any] = [given] if one else list(given)
        if len(many) > self.config.max_prompts:
            raise FieldError(f"{param}: {len(many)} prompts, but at most {self.config.max_prompts} are allowed", param)
        return [await self.encode(text, param=param) if isinstance(text, str) else text for text in many]


def too_long(tokens: str, limit: int, param: str) -> FieldError:
    # Clients recognise the first sentence, which is OpenAI's.
    what = "prediction" if param == "prediction" else "prompt"
    return FieldError(
        f"This model's maximum context length is {limit} tokens (engine.max_len). However, the {what} has {tokens} "
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
