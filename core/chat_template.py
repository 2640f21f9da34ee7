"""Chat templates: render messages into the model's prompt format, in transformers' Jinja sandbox.

A template is a program from a stranger, so a separate process executes it, with limits of time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.core.errors import ConfigError, DovetailError, RequestError
from dovetail.core.files import read_text
from dovetail.core.interfaces import Checkpoint
from dovetail.core.parallel.limited_process import CallFailed, LimitedProcess, answer_calls
from dovetail.core.special_tokens import special_tokens, tokenizer_config

MEMORY_BYTES = 1 << 30
"""Memory limit of the process that renders."""
LONGEST_PROMPT = 64 << 20
"""Maximum length of a prompt in characters."""
_WITH_TOOLS = "tool_use"
"""Name of a template for conversations with tools."""
TRIAL = ({"role": "user", "content": "Hello"},)
"""Conversation that every chat template should render."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template, which a Renderer renders."""

    source: str
    special: Mapping[str, str]
    """Variables that the template may use, such as bos_token."""
    tool_source: str | None = None
    """Template of conversations with tools, which some models have besides (Command R, Hermes 3); None = `source`."""

    def chosen(self, tools: object) -> str:
        """Return the source for a conversation with these tools; None = it has none."""
        return self.source if not tools or self.tool_source is None else self.tool_source

    @classmethod
    def load(cls, checkpoint: Checkpoint | None, file: Path | None = None) -> ChatTemplate | None:
        """Load `file`, else the checkpoint's chat_template.jinja or tokenizer_config.json; None without any template.
        Raises ConfigError for a file that cannot be read."""
        config = {} if checkpoint is None else tokenizer_config(checkpoint)
        special = special_tokens(config)
        if file is not None:
            return cls(read_text(file), special)
        if checkpoint is None:
            return None
        source, tool_source = checkpoint.text("chat_template.jinja"), None
        if source is not None:
            tool_source = checkpoint.text(f"additional_chat_templates/{_WITH_TOOLS}.jinja")
        else:
            by_name = _named(config.get("chat_template"), checkpoint.where("tokenizer_config.json"))
            source, tool_source = by_name.get("default"), by_name.get(_WITH_TOOLS)
        return None if source is None else cls(source, special, tool_source)


class Renderer:
    """Renders chat templates in a separate process. Use it in one thread, as LimitedProcess."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: time limit of one call."""
        self.process = LimitedProcess("dovetail.core.chat_template:main", seconds=seconds, memory=MEMORY_BYTES)
        self._template: ChatTemplate | None = None

    def render(self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """Render a prompt in well under a millisecond; a call that has to start the process takes seconds. Raises
        RequestError if the template refuses the messages, fails or passes a limit. `variables`: those of the template,
        with the arguments of transformers' apply_chat_template."""
        if template is not self._template:
            self._template, self.process.setup = template, asdict(template)
        try:
            return self.process.call(messages=list(messages), **variables)
        except CallFailed as error:
            raise RequestError(f"the model's chat template {error}") from None


def _named(stated: object, where: str) -> dict[str, str]:
    """Return the templates of tokenizer_config.json by name: a string is the one named "default"."""
    if stated is None:
        return {}
    if isinstance(stated, str):
        return {"default": stated}
    if not isinstance(stated, list):
        raise ConfigError(f"{where}: chat_template is {type(stated).__name__}; it must be a string or a list")
    try:
        found = {entry["name"]: entry["template"] for entry in stated}
    except (TypeError, KeyError):
        found = {}
    if len(found) != len(stated) or not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise ConfigError(f"{where}: chat_template is a list, but not of objects with a name and a template each")
    return found


class _Refusal(DovetailError):
    """Error of a template, with its words."""


def main(control_fd: int, parent: int) -> None:
    """Entry point of the process that renders."""
    import transformers.utils.chat_template_utils  # noqa: F401

    answer_calls(control_fd, parent, lambda setup: partial(_render, setup))


def _render(
    setup: Mapping[str, Any],
    /,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    from jinja2.exceptions import TemplateError, TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        (rendered,), _ = render_jinja_template(
            [messages],
            chat_template=ChatTemplate(**setup).chosen(variables.get("tools")),
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            **{**setup["special"], **variables},
        )
    except TemplateSyntaxError as error:
        raise _Refusal(f"cannot be parsed: {error} (line {error.lineno})") from None
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise _Refusal(f"refuses these messages: {error}") from None
    if len(rendered) > LONGEST_PROMPT:
        raise _Refusal(f"makes a prompt of {len(rendered)} characters, more than {LONGEST_PROMPT}")
    return str(rendered)
