"""A folder in the layout of gpt-oss by one command, with the parsers of its format."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path

import pytest

from ..numerics.published import save_published
from .conftest import wrote

TEMPLATE = """{%- for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endfor %}<|start|>assistant{# <|channel|> #}"""


@pytest.mark.nightly
def test_a_folder_of_the_published_layout_answers(start, tmp_path):
    tokenizer = Path(str(resources.files("dovetail.plugins.model.bundled"))) / "tiny"
    save_published(tmp_path, vocab_size=4096, max_position_embeddings=2048, eos_token_id=0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    words = ("model=auto", f"model.path={tmp_path}", "quant=auto")
    server = start(*words).wait_ready()
    assert any("model=llama" in line for line in server.log)
    call = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"place": "Rome"}<|call|>'
    written = f"<|channel|>analysis<|message|>Rome?<|end|><|start|>assistant{call}"
    tool = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
    answer = server.client().chat.completions.create(
        model=tmp_path.name, messages=[{"role": "user", "content": "hello"}], tools=[tool], extra_body=wrote(written)
    )
    message = answer.choices[0].message
    (made,) = message.tool_calls
    assert message.reasoning_content == "Rome?" and made.function.arguments == '{"place": "Rome"}'
    assert server.stop() == 0
