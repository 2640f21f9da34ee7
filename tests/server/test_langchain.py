"""LangChain's ChatOpenAI, unchanged. .ci/nightly installs it."""

from __future__ import annotations

import pytest

langchain_openai = pytest.importorskip("langchain_openai")

PROMPT = "def fib(n):\n"


def test_invoke_and_stream(server):
    chat = langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model="tiny", temperature=0, max_tokens=24, stream_usage=True
    )
    answer = chat.invoke(PROMPT)
    assert answer.content and answer.usage_metadata["output_tokens"] == 24
    chunks = list(chat.stream(PROMPT))
    assert "".join(chunk.content for chunk in chunks) == answer.content and len(chunks) > 5
    assert [one.content for one in chat.batch([PROMPT, PROMPT])] == [answer.content] * 2
