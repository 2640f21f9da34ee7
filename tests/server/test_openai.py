"""The API through the official client. Outputs are compared with those of an engine in this process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai.types.chat import ParsedChatCompletionMessage

from dovetail import LLM, SamplingParams

PROMPT = "def fib(n):\n"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(overrides=["+preset=tiny_cpu"]) as running:
        yield running


@pytest.fixture(scope="module")
def greedy(llm: LLM) -> str:
    return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))[0].text


def test_completions_are_the_engine_s(client, llm, greedy):
    prompts = [PROMPT, "import os\n", llm.tokenizer.encode("class Stack:\n")]
    expected = [g.text for g in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))]
    answer = client.completions.create(model="tiny", prompt=prompts[:2], temperature=0, max_tokens=24)
    assert [choice.text for choice in answer.choices] == expected[:2]
    assert answer.usage.completion_tokens == 48
    ids = client.completions.create(model="tiny", prompt=prompts[2], temperature=0, max_tokens=24)
    assert ids.choices[0].text == expected[2] and ids.choices[0].finish_reason == "length"
    chunks = list(client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=24, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == greedy
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    ask = dict(model="tiny", prompt=PROMPT, temperature=0, max_tokens=24, extra_body={"return_token_ids": True})
    ids = client.completions.create(**ask).choices[0].token_ids
    assert len(ids) == 24 and llm.tokenizer.decode(ids) == greedy
    assert [id for chunk in client.completions.create(**ask, stream=True) for id in chunk.choices[0].token_ids] == ids


def test_chat_streams_what_it_answers(client, greedy):
    ask = dict(model="tiny", messages=[{"role": "user", "content": PROMPT}], temperature=0, max_tokens=24)
    whole = client.chat.completions.create(**ask)
    assert whole.choices[0].message.content == greedy
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == greedy
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24


def test_a_predicted_output_is_counted(client, llm, greedy):
    """The prediction differs from the answer in the middle, and in its end."""
    ids = llm.tokenizer.encode(greedy, special=False)
    predicted = llm.tokenizer.decode(ids[:10]) + " zz zz " + llm.tokenizer.decode(ids[10:]) + "zz"
    ask = dict(model="tiny", messages=[{"role": "user", "content": PROMPT}], temperature=0, max_tokens=24)
    for content in (predicted, [{"type": "text", "text": predicted}]):
        answer = client.chat.completions.create(**ask, prediction={"type": "content", "content": content})
        assert answer.choices[0].message.content == greedy
        details = answer.usage.completion_tokens_details
        total = len(llm.tokenizer.encode(predicted, special=False))
        assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == total
        assert details.accepted_prediction_tokens >= 16 and details.rejected_prediction_tokens >= 2
    with pytest.raises(openai.BadRequestError, match="prediction: a part of type 'image' has no text"):
        client.chat.completions.create(**ask, prediction={"type": "content", "content": [{"type": "image"}]})
    with pytest.raises(openai.BadRequestError, match="the prediction has more than 2048 tokens: shorten it"):
        client.chat.completions.create(**ask, prediction={"type": "content", "content": "x = 1\n" * 20_000})


def test_sampling_fields_reach_the_engine(client, llm):
    params = SamplingParams(
        temperature=0.9, seed=7, top_k=40, min_p=0.01, presence_penalty=0.5, max_tokens=16, n=3, ignore_eos=True
    )
    expected = [c.text for c in llm.generate(PROMPT, params)[0].completions]
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": PROMPT}],
        temperature=0.9,
        seed=7,
        presence_penalty=0.5,
        max_tokens=16,
        n=3,
        extra_body={"top_k": 40, "min_p": 0.01, "ignore_eos": True, "priority": 3, "cache_salt": "x"},
    )
    assert [choice.message.content for choice in answer.choices] == expected
    assert len(set(expected)) == 3


def test_stop_and_bias_end_and_bend_the_output(client, llm, greedy):
    stop = greedy[5:9]
    stopped = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=24, stop=stop)
    assert stopped.choices[0].text == greedy[: greedy.index(stop)] and stopped.choices[0].finish_reason == "stop"
    (token,) = llm.tokenizer.encode("x", special=False)
    bent = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=4, logit_bias={str(token): 100}
    )
    assert bent.choices[0].text == "xxxx"


def test_logprobs(client, llm):
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "é = 1"}],
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
    )
    entries = chat.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == chat.choices[0].message.content
    assert all(entry.top_logprobs[0].logprob == entry.logprob and len(entry.top_logprobs) == 3 for entry in entries)
    answer = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=3, logprobs=2, echo=True)
    found, text = answer.choices[0].logprobs, answer.choices[0].text
    assert text.startswith(PROMPT)
    ids = llm.tokenizer.encode(PROMPT)
    assert len(found.tokens) == len(ids) + 3 and found.token_logprobs[0] is None
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=2))[0]
    assert found.token_logprobs[1 : len(ids)] == pytest.approx([p.logprob for p in expected.prompt_logprobs], abs=1e-4)
    assert all(text.startswith(t, at) for t, at in zip(found.tokens[1:], found.text_offset[1:], strict=True))
    assert found.text_offset[:2] == [0, 0], "BOS is not in the text"
    ask = dict(model="tiny", prompt=PROMPT, seed=1, max_tokens=3, logprobs=2, echo=True, n=2)
    streamed: dict[int, list[float | None]] = {0: [], 1: []}
    for chunk in client.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.logprobs.token_logprobs
    for choice in client.completions.create(**ask).choices:
        given = choice.logprobs.token_logprobs[: len(ids)]
        assert given[1:] == pytest.approx(found.token_logprobs[1 : len(ids)], abs=1e-4)
        assert streamed[choice.index][1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)
    alone = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, logprobs=1, echo=True)
    assert alone.choices[0].text == PROMPT and len(alone.choices[0].logprobs.tokens) == len(ids)


def test_answers_of_openai_can_be_sent_back(conversing):
    """Every field of the SDK's messages is accepted, and none reaches the template."""
    call = {
        "id": "a",
        "index": 0,
        "type": "function",
        "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}},
    }
    answer = ParsedChatCompletionMessage(
        role="assistant", content="x", annotations=[], tool_calls=[call], parsed={"a": 1}
    )
    messages = [answer.model_dump(), {"role": "tool", "tool_call_id": "a", "content": "1"}]
    ask = dict(model="tiny", messages=messages, max_tokens=1)
    count = conversing.client().chat.completions.create(**ask).usage.prompt_tokens
    plain = {
        "role": "assistant",
        "content": "x",
        "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
    }
    ask["messages"] = [plain, messages[1]]
    assert conversing.client().chat.completions.create(**ask).usage.prompt_tokens == count


def test_best_of_is_the_likeliest(client):
    drawn = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, seed=3, n=6, logprobs=0)
    best = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, seed=3, n=1, best_of=6)
    mean = {c.text: sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens) for c in drawn.choices}
    assert best.choices[0].text == max(mean, key=mean.__getitem__)
    assert best.usage.completion_tokens == drawn.usage.completion_tokens


def test_responses(client, greedy):
    ask = dict(model="tiny", input=PROMPT, temperature=0, max_output_tokens=24)
    whole = client.responses.create(**ask)
    assert whole.output_text == greedy and whole.status == "incomplete" and whole.usage.output_tokens == 24
    events = list(client.responses.create(**ask, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == greedy
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[-1].response.output_text == greedy


def test_tokens_there_and_back(server):
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": PROMPT}).json()
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == 2048
    text = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens["tokens"][1:]}).json()["prompt"]
    assert text == PROMPT
    chat = {"messages": [{"role": "user", "content": "x = 1"}]}
    assert httpx.post(f"{server.url}/tokenize", json=chat).json()["count"] > 2


def test_models_and_health(server, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    for path in ("health", "ready", "version", "metrics", "stats", "composition", "openapi.json"):
        assert httpx.get(f"{server.url}/{path}").status_code == 200, path
    parts = httpx.get(f"{server.url}/composition").json()["parts"]
    assert parts["model"][0]["name"] == "llama" and parts["scheduler"][0]["name"] == "fcfs"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("completions", {"prompt": "x", "model": "gpt-5"}, 404, "does not exist"),
        ("completions", {"prompt": "x" * 40000}, 400, "context"),
        ("completions", {"prompt": [99999]}, 400, "vocabulary"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "x", "max_tokenz": 1}, 400, "max_tokenz"),
        ("completions", {"prompt": ["x"] * 3000}, 400, "prompts"),
        ("completions", {"prompt": "x", "n": 2, "best_of": 1}, 400, "best_of"),
        ("completions", {"prompt": "x", "logit_bias": {"99999": 1}}, 400, "vocabulary"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
        ("embeddings", {"input": "x"}, 400, "serve.pooling=last"),
        ("responses", {"input": "x", "previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ("nowhere", {}, 404, "nowhere"),
    ],
)
def test_errors_are_openai_s(server, path, body, status, words):
    answer = httpx.post(f"{server.url}/v1/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error.keys()) == (status, {"message", "type", "param", "code"})
    assert words in error["message"]


def test_the_client_raises_its_own_errors(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="context"):
        list(client.completions.create(model="tiny", prompt="x " * 4000, stream=True))


def test_curl(server):
    body = json.dumps({"prompt": PROMPT, "max_tokens": 4, "stream": True})
    url = f"{server.url}/v1/completions"
    words = ["curl", "-sN", url, "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    lines = [line for line in done.stdout.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: {") for line in lines[:-1])


def test_structured_output(client):
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [11, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": PROMPT}],
        temperature=0,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content)["n"] in (11, 22)
    chosen = client.completions.create(model="tiny", prompt=PROMPT, extra_body={"choice": ["yes", "no"]})
    assert chosen.choices[0].text in ("yes", "no") and chosen.choices[0].finish_reason == "stop"
