"""Chat templates of a model's folder: those for conversations with tools, and their special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from dovetail.core.chat_template import TRIAL, ChatTemplate, Renderer
from dovetail.core.checkpoint import FolderCheckpoint
from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError
from dovetail.plugins.app.serve.output_parsing import check_chosen

from .test_chosen_parsers import SHAPE

PLAIN, TOOLS = "{{ bos_token }}{{ messages[0].content }}", "{{ bos_token }}<tool_call>{{ tools[0].function.name }}"
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
BOTH = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS}]
DECODER = {"1": {"content": "<other>", "special": True}}


def write(folder: Path, config: dict[str, Any], **files: str) -> Path:
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_jinja", ".jinja").replace("_json", ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"<s>": 0, "<other>": 1, "Hello": 2}, "unk_token": "<other>"},
}


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": BOTH, "bos_token": "<s>"}, {}),
        ({"bos_token": "<s>"}, {"chat_template_jinja": PLAIN, "additional_chat_templates__tool_use_jinja": TOOLS}),
        # A file replaces all templates of tokenizer_config.json.
        ({"chat_template": BOTH, "bos_token": "<s>"}, {"chat_template_jinja": PLAIN}),
        ({"chat_template": BOTH}, {"special_tokens_map_json": '{"bos_token": {"content": "<s>", "lstrip": false}}'}),
        (
            {"chat_template": PLAIN, "added_tokens_decoder": DECODER, "bos_token": "<s>"},
            {"special_tokens_map_json": '{"bos_token": "<other>"}'},
        ),
    ],
)
def test_prompts_are_those_of_transformers(config: dict[str, Any], files: dict[str, str], tmp_path: Path) -> None:
    library = PreTrainedTokenizerFast.from_pretrained(write(tmp_path, config, **files))
    template = ChatTemplate.load(FolderCheckpoint(tmp_path))
    assert template is not None
    renderer = Renderer(60)
    for tools in (None, [TOOL]):
        expected = library.apply_chat_template(list(TRIAL), tools=tools, tokenize=False)
        assert renderer.render(template, TRIAL, tools=tools) == expected
        assert expected.startswith("<s>")
    renderer.process.close()


def test_the_template_for_tools_decides_about_their_parser(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template": [BOTH[0], {"name": "tool_use", "template": "{{ '<tool_call>' }}"}]})
    for parser in ("hermes", "harmony"):
        composition = compose(["model=auto", f"model.path={tmp_path}", f"serve.tool_parser={parser}"], app="serve")
        if parser == "hermes":
            check_chosen(composition.app_part.config, composition)
        else:
            with pytest.raises(ConfigError, match="of the format hermes"):
                check_chosen(composition.app_part.config, composition)
