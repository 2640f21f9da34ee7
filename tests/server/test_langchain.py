"""LangChain's ChatOpenAI, unmodified. .ci/nightly installs it."""

from __future__ import annotations

from typing import Literal

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


@pytest.mark.parametrize("responses", [False, True])
def test_a_tool_is_called_and_answered(conversing, responses):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def stop(reason: Literal["done", "tired"]) -> str:
        """Stop, for a reason."""
        return reason

    chat = langchain_openai.ChatOpenAI(
        base_url=f"{conversing.url}/v1", api_key="none", model="tiny", max_tokens=64, use_responses_api=responses
    )
    question = [HumanMessage("Stop.")]
    answer = chat.bind_tools([stop], tool_choice="stop").invoke(question)
    (call,) = answer.tool_calls
    assert call["name"] == "stop" and call["args"]["reason"] in ("done", "tired")
    messages = [*question, answer, ToolMessage(stop.invoke(call["args"]), tool_call_id=call["id"])]
    assert (
        chat.bind_tools([stop]).invoke(messages).usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]
    )
