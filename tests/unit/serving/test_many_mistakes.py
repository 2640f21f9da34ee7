"""A body of megabytes with a mistake in each entry costs no more than one with a single mistake. pydantic would record
each: 8 MB of them occupied the event loop for minutes and took 10 GB."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from dovetail.plugins.app.serve import schemas

BODIES: tuple[type[BaseModel], ...] = (
    schemas.CompletionRequest,
    schemas.ChatRequest,
    schemas.ResponsesRequest,
    schemas.EmbeddingRequest,
    schemas.TokenizeRequest,
    schemas.DetokenizeRequest,
)
WRONG: tuple[tuple[Any, ...], ...] = (("x", None, [1]), ({}, [""], None))
MANY, FEW = 20_000, 8
CHAT = {"messages": [{"role": "user", "content": "x"}]}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"a": [float("nan")] * MANY}}}


def mistakes(body: type[BaseModel], value: object) -> int:
    with pytest.raises(ValidationError) as caught:
        body.model_validate(value)
    return caught.value.error_count()


@pytest.mark.parametrize(
    ("body", "value"),
    [
        *((schemas.CompletionRequest, {"prompt": [*[1] * MANY, wrong]}) for wrong in WRONG[0]),
        *((schemas.CompletionRequest, {"prompt": [wrong] * MANY}) for wrong in WRONG[1]),
        (schemas.CompletionRequest, {"prompt": [[""] * MANY]}),
        (schemas.EmbeddingRequest, {"input": [{}] * MANY}),
        (schemas.CompletionRequest, {"prompt": "x", **{f"k{i}": 1 for i in range(MANY)}}),
        *(
            (schemas.CompletionRequest, {"prompt": "x", field: {f"k{i}": "x" for i in range(MANY)}})
            for field in ("logit_bias", "hints")
        ),
        (schemas.CompletionRequest, {"prompt": "x", "extra": {f"\ud800{i}": 1 for i in range(MANY)}}),
        *(
            (schemas.CompletionRequest, {"prompt": "x", "metadata": {"a": [wrong] * MANY}})
            for wrong in (float("nan"), "\ud800")
        ),
        (schemas.CompletionRequest, {"prompt": "x", "metadata": {f"\ud800{i}": 1 for i in range(MANY)}}),
        (schemas.CompletionRequest, {"prompt": "x", "extra": {"a": [float("nan")] * MANY}}),
        (schemas.CompletionRequest, {"prompt": "x", "response_format": SCHEMA}),
        (schemas.ChatRequest, {**CHAT, "chat_template_kwargs": {"a": [float("inf")] * MANY}}),
        (schemas.ChatRequest, {"messages": [{**CHAT["messages"][0], "annotations": [float("nan")] * MANY}]}),
        (schemas.ChatRequest, {"messages": [{**CHAT["messages"][0], **{f"k{i}": 1 for i in range(MANY)}}]}),
    ],
)
def test_the_first_mistake_ends_the_check(body: type[BaseModel], value: object) -> None:
    assert mistakes(body, value) <= FEW


MANY_ITEMS = schemas.MOST_ITEMS + 1
LARGE = ["x" * 1024] * 1024
"""More than a megabyte of JSON."""


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (schemas.CompletionRequest, {"prompt": [[1]] * MANY_ITEMS}),
        (schemas.CompletionRequest, {"prompt": ["x"] * MANY_ITEMS}),
        (schemas.EmbeddingRequest, {"input": ["x"] * MANY_ITEMS}),
        (schemas.ChatRequest, {"messages": CHAT["messages"] * MANY_ITEMS}),
        (schemas.ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * MANY_ITEMS}]}),
        (schemas.ResponsesRequest, {"input": [{"role": "user", "content": ""}] * MANY_ITEMS}),
        (schemas.CompletionRequest, {"prompt": "x", "choice": ["x"] * MANY_ITEMS}),
        (schemas.ChatRequest, {**CHAT, "metadata": {"a": LARGE}}),
        (schemas.ChatRequest, {**CHAT, "chat_template_kwargs": {"a": LARGE}}),
        (
            schemas.ChatRequest,
            {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": LARGE}}}]},
        ),
        (schemas.CompletionRequest, {"prompt": "x", "extra": {"a": LARGE}}),
    ],
)
def test_what_is_right_but_too_large_is_refused_before_it_is_validated(body: type[BaseModel], value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        body.model_validate(value)
    # Where a field may also be a string, the first error says that it is none.
    message = caught.value.errors(include_input=False)[-1]["msg"]
    assert message.endswith((f"limit is {schemas.MOST_ITEMS}", f"limit is {schemas.MOST_VALUE_BYTES}"))


@pytest.mark.parametrize("body", BODIES)
def test_every_list_ends_at_its_first_mistake(body: type[BaseModel]) -> None:
    """Lists that are added later, too."""
    lists = [found for found in _schemas(body.__pydantic_core_schema__) if found.get("type") == "list"]
    own = [found for found in lists if not _of_json(found)]
    assert own and all(found.get("fail_fast") for found in own), own


def _of_json(schema: dict[str, Any]) -> bool:
    """Whether the list is one of JsonValue, whose mistakes are found before."""
    item = schema.get("items_schema", {})
    return item.get("type") == "definition-ref" and "JsonValue" in item["schema_ref"]


def _schemas(value: Any) -> Any:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _schemas(one)


def test_what_is_right_still_passes() -> None:
    prompts: Any = TypeAdapter(schemas.Prompts)
    for given in ("x", ["x", "y"], [1, 2], [[1], [2, 3]]):
        assert prompts.validate_python(given, strict=True) == given
    kept = schemas.CompletionRequest.model_validate({"prompt": "x", "metadata": {"a": [1.5, None, {"b": "é"}]}})
    assert json.dumps(kept.metadata) == '{"a": [1.5, null, {"b": "\\u00e9"}]}'


def test_a_type_is_repeated_in_a_few_words_only() -> None:
    part = {"type": "x" * 1_000_000}
    assert mistakes(schemas.ChatRequest, {"messages": [{"role": "user", "content": [part]}]}) <= FEW
