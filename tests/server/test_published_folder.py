"""Folders by one command: the layout of gpt-oss with the parsers of its format, families with experts, and a decoder
without a native family."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path

import pytest
import torch

from ..numerics.checkpoints import save_random
from ..numerics.decoders import save_decoder
from ..numerics.published import save_blocks, save_published
from .conftest import Server, wrote

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
    assert completed(server, tmp_path.name) == continued(model)
    assert server.stop() == 0


@pytest.mark.parametrize(
    "variant", ["mixtral", "qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3"]
)
def test_a_folder_with_experts_answers(variant, start, tmp_path):
    """The tokens are those of the model in transformers. DeepSeek V3 has scales of blocks, as it is published."""
    model = save_random(tmp_path, variant, vocab_size=4096)
    words = []
    if variant == "deepseek_v3":
        save_blocks(tmp_path, model)
        words = ["quant=fp8", "quant.activations=plain"]
    add_tokenizer(tmp_path)
    server = start("model=auto", f"model.path={tmp_path}", *words).wait_ready()
    assert any("model=llama" in line for line in server.log)
    assert completed(server, tmp_path.name) == continued(model)
    assert server.stop() == 0


PROMPT = [5, 7, 11, 13]


def completed(server: Server, name: str) -> list[int]:
    """Return the tokens with which the server continues PROMPT."""
    answer = server.client().completions.create(
        model=name, prompt=PROMPT, max_tokens=8, temperature=0.0, extra_body={"return_token_ids": True}
    )
    return answer.choices[0].token_ids


def continued(model: torch.nn.Module) -> list[int]:
    """Return the tokens with which transformers continues PROMPT."""
    return model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)[0, len(PROMPT) :].tolist()
