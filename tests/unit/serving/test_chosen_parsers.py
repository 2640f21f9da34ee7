"""Parsers that the server's options name, against the chat template of the model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.core.compose import compose
from dovetail.core.compose.cli import main
from dovetail.core.errors import ConfigError
from dovetail.plugins.app.serve.output_parsing import check_chosen

SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
HARMONY = "{{ '<|start|>assistant<|channel|>final<|message|>' }}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "chat_template.jinja").write_text(HARMONY)
    return tmp_path


@pytest.mark.parametrize("model", ["auto", "transformers"])
def test_a_parser_of_another_format_ends_the_start(
    model: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["app=serve", f"model={model}", f"model.path={folder}", "serve.tool_parser=hermes"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"serve.tool_parser=hermes: {folder} has a chat template of the format harmony" in line
    assert "serve.tool_parser=harmony or auto" in line and "serve.chat_template=FILE" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["serve.reasoning_parser=think"], "serve.reasoning_parser=think: .* of the format harmony"),
        (["serve.tool_parser=hermess"], "no such tool_parser. Options: auto, harmony, hermes"),
        (["serve.tool_parser=harmony", "serve.reasoning_parser=harmony"], None),
        (["serve.tool_parser=none", "serve.reasoning_parser=none"], None),
        # Another template, and one that has no known format, for which any parser may be right.
        (["serve.tool_parser=hermes", "serve.chat_template={hermes}"], None),
        (["serve.tool_parser=harmony", "serve.chat_template={hermes}"], "hermes.jinja has a chat template of the f"),
        (["serve.tool_parser=hermes", "serve.chat_template={unknown}"], None),
    ],
)
def test_what_is_checked(folder: Path, options: list[str], message: str | None) -> None:
    files = {"hermes": "{{ '<tool_call>' }}", "unknown": "{{ messages[0].content }}"}
    for name, template in files.items():
        (folder / f"{name}.jinja").write_text(template)
    named = [option.format(**{name: folder / f"{name}.jinja" for name in files}) for option in options]
    composition = compose(["model=auto", f"model.path={folder}", *named], app="serve")
    if message is None:
        check_chosen(composition.app_part.config, composition)
        return
    with pytest.raises(ConfigError, match=message):
        check_chosen(composition.app_part.config, composition)


def test_virtual_time_is_refused_before_the_server_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["app=serve", "executor=simulated", "executor.clock=virtual"]) == 2
    printed = capsys.readouterr().err
    assert "set executor.clock=real" in printed and len(printed.splitlines()) == 1
