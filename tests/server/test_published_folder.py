"""Folders by one command: the layout of gpt-oss with the parsers of its format, and a decoder without a native
family."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path

import pytest
import torch

from ..numerics.decoders import save_decoder
from ..numerics.published import save_published
from .conftest import wrote

TEMPLATE = """{%- for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endfor %}<|start|>assistant{# <|channel|> #}"""


pytestmark = pytest.mark.nightly


def add_tokenizer(folder: Path) -> None:
    tokenizer = Path(str(resources.files("dovetail.plugins.model.bundled"))) / "tiny"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)


def test_a_folder_of_the_published_layout_answers(start, tmp_path):
    save_published(tmp_path, vocab_size=4096, max_position_embeddings=2048, eos_token_id=0)
    add_tokenizer(tmp_path)
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


def test_a_folder_of_a_decoder_without_a_native_family_answers(start, tmp_path):
    """The tokens are those of the model in transformers."""
    model = save_decoder(tmp_path, "phi", vocab_size=4096)
    add_tokenizer(tmp_path)
    server = start("model=auto", f"model.path={tmp_path}").wait_ready()
    assert any("model=auto chose model=transformers" in line for line in server.log)
    prompt = [5, 7, 11, 13]
    answer = server.client().completions.create(
        model=tmp_path.name, prompt=prompt, max_tokens=8, temperature=0.0, extra_body={"return_token_ids": True}
    )
    whole = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert answer.choices[0].token_ids == whole[0, len(prompt) :].tolist()
    assert server.stop() == 0
