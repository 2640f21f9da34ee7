"""Error messages for invalid request bodies."""

from __future__ import annotations

import gzip
import re

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, ConfigDict, ValidationError

from dovetail.core.errors import RequestError
from dovetail.plugins.app.serve import errors, schemas

LONG_NAME = b'{"prompt": "x", "' + b"y" * 9000 + b'": 3}'


class Message(BaseModel):
    role: str
    content: str | list[str] | None = None


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")
    prompt: str | list[str] | list[int]
    messages: list[Message] = []


@pytest.mark.parametrize(
    ("content", "kind", "message", "param"),
    [
        (b'{"prompt": "x", ', "application/json", "the body is not JSON: Expecting .* at character 16", None),
        (b'{"prompt": "x"}', "application/x-www-form-urlencoded", "lacks the header `content-type: appl", None),
        (
            b'{"prompt": {}}',
            "application/json",
            "^prompt: Input should be a valid string, or: Input should be a valid list$",
            "prompt",
        ),
        (b'{"prompt": ["x", 3]}', "application/json", "^prompt.1: Input should be a valid string$", "prompt"),
        (b'{"prompt": "x", "messages": [{}]}', "application/json", "^messages.0.role: Field required$", "messages"),
        (
            b'{"prompt": "x", "messages": [{"role": "user", "content": [3]}]}',
            "application/json",
            "^messages.0.content.0: Input should be a valid string$",
            "messages",
        ),
        (b"[" * 100_000, "application/json", "the body is nested too deeply", None),
        (b'"\xff"', "application/json", "the body is not valid UTF-8", None),
        (b'{"prompt": "x", "max_token": 3}', "application/json", "max_token: there is no such field", "max_token"),
        (
            b'{"prompt": "x", "' + b"y" * 9000 + b'": 3}',
            "application/json",
            r"^y+\.\.\.y+: .{,250}$",
            f"{'y' * 57}...{'y' * 58}",
        ),
        (
            b'{"prompt": "x", "prediction": {"type": "content", "content": "y"}}',
            "application/json",
            "^prediction: there is no such field; it is a field of /v1/chat/completions$",
            "prediction",
        ),
        (b'{"prompt": "x", "no_repeat": 3}', "application/json", r'given as "extra": {"no_repeat": ...}', "no_repeat"),
    ],
)
def test_an_invalid_body_gets_a_message_with_the_cause(
    content: bytes, kind: str, message: str, param: str | None
) -> None:
    app = FastAPI()
    errors.install(app)

    @app.post("/")
    async def take(body: Body) -> None: ...

    answer = TestClient(app).post("/", content=content, headers={"content-type": kind})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param
    assert re.search(message, error["message"]), error


def test_a_compressed_body_is_refused_by_name() -> None:
    app = FastAPI()
    errors.install(app)

    @app.post("/")
    async def take(body: Body) -> None: ...

    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = TestClient(app).post("/", content=gzip.compress(b'{"prompt": "x"}'), headers=headers)
    assert answer.status_code == 400 and "only bodies that are not compressed" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("role", "refused"), [("user", True), ("tool", True), ("assistant", False)])
def test_a_message_needs_content_unless_it_is_the_assistants(role: str, refused: bool):
    app = FastAPI()
    errors.install(app)
    app.post("/")(_read)
    answer = TestClient(app).post("/", json={"role": role})
    assert answer.status_code == (400 if refused else 200)
    assert not refused or answer.json()["error"]["message"] == f"body: a message of the role {role} needs content"


def _read(body: schemas.Message) -> dict[str, str]:
    return {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "0.5"),
        ("temperature", True),
        ("max_tokens", "5"),
        ("max_tokens", 5.0),
        ("n", True),
        ("stream", 1),
        ("stream", "yes"),
        ("logit_bias", {"1": "2"}),
        *(("logit_bias", {key: 1}) for key in ("1.0", "1_0", "+1", " 1", "01", "-1", "", "9999999999")),
        ("stop_token_ids", [True]),
        ("hints", {"a": "1"}),
        ("stream_options", {"include_usage": "true"}),
    ],
)
def test_values_of_another_type_are_refused(field: str, value: object) -> None:
    """Keys of logit_bias are token ids in strings, as in OpenAI's API. A field for a float also takes an integer."""
    chat = {"messages": [{"role": "user", "content": "x"}], "temperature": 1, "logit_bias": {"7": 1}}
    assert schemas.ChatRequest.model_validate(chat).logit_bias == {7: 1.0}
    with pytest.raises(ValidationError) as refused:
        schemas.ChatRequest.model_validate({**chat, field: value})
    assert [error["loc"][0] for error in refused.value.errors()] == [field]


def test_the_engines_messages_name_fields() -> None:
    assert errors.body_of(RequestError("logit_bias: token id 9 is not in the vocabulary"))[1]["error"]["param"] == (
        "logit_bias"
    )
    assert errors.body_of(RequestError("grammar: json_schema: Invalid type"))[1]["error"]["param"] is None
