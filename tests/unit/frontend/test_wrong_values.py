"""A request with a wrong value is refused alone, wherever it comes from: the engine and its other requests go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dovetail import LLM, RequestError, SamplingParams
from dovetail.core.compose import compose
from dovetail.core.engine.requests import RequestBuilder
from dovetail.core.errors import PluginError
from dovetail.core.frontend.engine_loop import EngineRequests
from dovetail.core.frontend.local_engine import _LocalCommands
from dovetail.core.frontend.messages import Add, StepMessage
from dovetail.core.frontend.replicas import CheckedRouter
from dovetail.core.frontend.request_table import Delivery, NewRequest, RequestTable
from dovetail.core.interfaces import RequestOptions
from dovetail.core.interfaces.request_values import token_ids

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
LARGE = 2**31 - 1
WRONG_IDS = [[1.5, 2.0], [1, 2.0], [True], ["a", 1], [None], [[1]], None, 3, "abc", np.array([1.0]), np.array([True])]
WRONG_OPTIONS = [
    {"priority": None},
    {"priority": "high"},
    {"priority": True},
    {"priority": 1.5},
    {"priority": 2**63},
    {"user": 3},
    {"user": [1]},
    {"user": None},
    {"user": "\ud800"},
    {"cache_salt": 3},
    {"cache_salt": "\ud800"},
    {"adapter": 3},
    {"deadline": "soon"},
    {"deadline": float("nan")},
    {"hints": "abc"},
    {"hints": {"a": "x"}},
    {"hints": {"a": float("nan")}},
    {"hints": {"a": 10**400}},
    {"hints": {"a": True}},
    {"hints": {3: 1.0}},
    {"pooling": "sum"},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", overrides=["engine.device=cpu", "engine.max_len=128", "scheduler=fair", "kv_cache=radix"]) as llm:
        yield llm


def works(llm: LLM) -> bool:
    return len(llm.generate("ok", GREEDY)[0].token_ids) == 4


@pytest.mark.parametrize("ids", WRONG_IDS, ids=repr)
def test_token_ids_are_integers(llm: LLM, ids: Any) -> None:
    table = RequestTable(CheckedRouter(llm.composition))
    with pytest.raises(RequestError, match="not a token id|not text or a sequence"):
        table.submit(NewRequest(ids, GREEDY, RequestOptions(), lambda request, delivery: None))
    if not isinstance(ids, str):
        with pytest.raises(RequestError, match="not a token id|not text or a sequence"):
            list(llm.stream(ids, GREEDY))
    assert works(llm)


def test_integers_of_numpy_and_torch_are_token_ids(llm: LLM) -> None:
    (wanted,) = llm.generate([1, 2, 3], GREEDY)
    for ids in ([1, 2, 3], np.array([1, 2, 3], np.uint16), torch.tensor([1, 2, 3]), [np.int64(1), np.int32(2), 3]):
        assert list(map(type, token_ids(ids))) == [int] * 3
        for prompts in ([ids], *([] if isinstance(ids, torch.Tensor) else [ids])):
            (found,) = llm.generate(prompts, GREEDY)
            assert (found.prompt_ids, found.token_ids) == ((1, 2, 3), wanted.token_ids)


@pytest.mark.parametrize("options", WRONG_OPTIONS, ids=repr)
def test_options_have_their_types(llm: LLM, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        RequestOptions(**options)
    with pytest.raises(RequestError, match=next(iter(options))):
        llm.generate(["a", "b"], GREEDY, **options)
    assert works(llm)


def test_numbers_of_numpy_become_plain() -> None:
    options = RequestOptions(priority=np.int64(3), deadline=np.float32(0.5), hints={"a": np.int32(2)})  # type: ignore
    assert [type(one) for one in (options.priority, options.deadline, options.hints["a"])] == [int, float, float]
    assert options == RequestOptions(priority=3, deadline=0.5, hints={"a": 2})


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": LARGE, "min_tokens": LARGE},
        {"temperature": 5e-324},
        {"temperature": 100.0, "top_k": LARGE},
        {"top_k": 1, "logprobs": 64, "prompt_logprobs": 64},
        {"top_p": 5e-324, "min_p": 1.0},
        {"min_p": 5e-324, "seed": 2**63 - 1},
        {"repetition_penalty": 5e-324, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logit_bias": {0: 100.0, 4095: -100.0}, "stop_token_ids": (0, 4095)},
        {"n": 128},
    ],
    ids=lambda values: " ".join(values),
)
def test_the_engine_survives_the_extremes_of_each_parameter(llm: LLM, values: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 3, "temperature": 1.0, "ignore_eos": True, **values})
    delta = next(iter(llm.stream("x", params)))
    assert delta.token_ids and works(llm)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"n": 0},
        {"max_tokens": -1},
        {"stop": (3,)},
        {"seed": "a"},
        {"top_p": None},
        {"logit_bias": {"a": 1}},
        {"logprobs": -1},
    ],
    ids=repr,
)
def test_a_copy_with_unchecked_values_is_checked_on_submission(llm: LLM, values: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(values))):
        llm.generate("x", GREEDY.model_copy(update=values))
    assert works(llm)


def test_log_probabilities_of_more_tokens_than_there_are_is_refused(llm: LLM) -> None:
    spec = replace(llm.engine.info.spec, vocab=40)
    builder = RequestBuilder(llm.composition, spec, 128)
    for name in ("logprobs", "prompt_logprobs"):
        assert builder.sequences([1], SamplingParams(**{name: 40}), RequestOptions())
        with pytest.raises(RequestError, match=f"^{name}=41: the model's vocabulary has only 40 tokens"):
            builder.sequences([1], SamplingParams(**{name: 41}), RequestOptions())


def test_a_processor_that_fails_on_arrival_fails_only_that_request(caplog: pytest.LogCaptureFixture) -> None:
    """In an engine whose front-end validates nothing: the front-end may be in another process."""

    class Refusing:
        def add(self, *arguments: Any, **options: Any) -> Any:
            raise PluginError("acme 1.0", "logits=only failed on a request: KeyError: 'mood'")

    table = RequestTable(CheckedRouter(compose(["+preset=tiny_cpu"], app="generate")))
    delivered: list[Delivery] = []
    port = _LocalCommands(lambda message: table.receive(0, message))  # type: ignore[arg-type]
    requests = EngineRequests(Refusing())  # type: ignore[arg-type]

    class Transport:
        def send(self, *commands: Any) -> None:
            for command in commands:
                assert isinstance(command, Add)
                requests.add(port, command)

    table.connect(0, Transport())
    table.submit(NewRequest([1], GREEDY, RequestOptions(), lambda request, delivery: delivered.append(delivery)))
    assert isinstance(port.updates, list)
    table.receive(0, StepMessage(port.updates))
    ((_, error, last),) = delivered
    assert last and isinstance(error, RequestError) and error.status == 500
    assert "acme 1.0" in str(error) and "refused" in caplog.text
