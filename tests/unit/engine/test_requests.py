"""Logits processors validate a request on arrival, and their errors fail only that request."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from pydantic import Field

from dovetail import LLM, Component, Config, SamplingParams, compose
from dovetail.core.compose import Package, Registered, Registry, installed
from dovetail.core.errors import CapabilityError, PluginError, RequestError
from dovetail.core.interfaces import LogitsContext, LogitsProcessor, Request

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Empty(Config):
    """No options."""


class Only(LogitsProcessor):
    """Restricts a request to one token."""

    class params(Config):
        only: int | None = Field(None, ge=0)
        """Token id; null: any token."""
        mood: tuple[str, ...] = ()
        """Methods that fail."""

    def allocate(self, slots: int, vocab: int, device: torch.device) -> None:
        self.only_S = torch.full((slots,), -1, dtype=torch.int64, device=device)

    def validate(self, request: Request, vocab: int) -> None:
        only = self.parameters(request).only
        if only is not None and only >= vocab:
            raise RequestError(f"only: token id {only} is not in the vocabulary of {vocab}", status=422)

    def wants(self, request: Request) -> bool:
        if "wants" in self.parameters(request).mood:
            raise KeyError("mood")
        return self.parameters(request).only is not None

    def join(self, slot: int, request: Request) -> None:
        if "join" in self.parameters(request).mood:
            raise IndexError("mood")
        self.only_S[slot] = self.parameters(request).only if self.wants(request) else -1

    def apply(self, logits_NV: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        only_N1 = self.only_S[ctx.slots_N][:, None]
        others_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device) != only_N1
        return logits_NV.masked_fill(others_NV & (only_N1 >= 0), float("-inf"))


class Twin(Only):
    """Has the same parameter names."""


class Hot(Only):
    class params(Config):
        temperature: float = 1.0


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    module = ModuleType("acme_logits")
    package = Package("acme", "1.0")
    parts = []
    for processor in (Only, Twin, Hot):
        name = processor.__name__.lower()
        setattr(module, name, processor)
        component = Component(kind="logits", name=name, config=Empty, target=f"acme_logits:{name}", api="logits/0.2")
        parts.append(Registered(component, package))
    sys.modules[module.__name__] = module
    own = installed()
    yield Registry([*own.registered.values(), *parts], own.problems, own.config_dirs)
    del sys.modules[module.__name__]


def start(registry: Registry, logits: str) -> LLM:
    words = [f"logits=[{logits}]", "engine.device=cpu", "engine.max_len=128", "engine.kv_pages=64"]
    return LLM(composition=compose(words, registry=registry))


@pytest.fixture(scope="module")
def llm(registry: Registry) -> Iterator[LLM]:
    with start(registry, "penalties,only") as llm:
        yield llm


def test_a_request_sets_a_parameter_of_a_processor(llm: LLM) -> None:
    (free,) = llm.generate("def f(", GREEDY)
    params = [GREEDY, GREEDY.model_copy(update={"extra": {"only": 7}})]
    other, bound = llm.generate(["def f("] * 2, params)
    assert bound.token_ids == [7] * 8 and other.token_ids == free.token_ids != bound.token_ids


@pytest.mark.parametrize(
    ("extra", "error", "words"),
    [
        ({"onlyy": 3}, RequestError, "has a parameter `onlyy`. Did you mean `only`? There are: only, mood."),
        ({"only": -1}, RequestError, "extra: only: Input should be greater than or equal to 0"),
        ({"only": True, "mood": "x"}, RequestError, "; mood: "),
        ({"only": 10**6}, RequestError, "only: token id 1000000 is not in the vocabulary"),
        ({"mood": ["wants"]}, PluginError, "package acme 1.0: logits=only failed on a request: KeyError: 'mood'"),
        ({"only": 1, "mood": ["join"]}, PluginError, "logits=only failed on a request: IndexError: mood"),
    ],
)
def test_an_error_on_arrival_fails_only_that_request(llm: LLM, extra: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        llm.generate("x", GREEDY.model_copy(update={"extra": extra}))
    assert len(llm.generate("ok", GREEDY)[0].token_ids) == 8


@pytest.mark.parametrize(
    ("logits", "error", "words"),
    [
        ("only,twin", CapabilityError, "logits=only and logits=twin both have a request parameter `only`"),
        ("hot", PluginError, "package acme 1.0: logits=hot: its request parameter `temperature`"),
    ],
)
def test_clashing_names_fail_the_start(registry: Registry, logits: str, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        start(registry, logits)


def nested(depth: int) -> object:
    return [nested(depth - 1)] if depth else 0


@pytest.mark.parametrize(
    "extra",
    [
        {"a": float("nan")},
        {"a": [float("inf")]},
        {"a": "x" * 70_000},
        {"a": nested(400)},
        {"a": {1, 2}},
        {"a": object()},
        {3: 1},
        {str(i): 0 for i in range(65)},
        "abc",
    ],
    ids=["nan", "inf", "large", "deep", "a_set", "an_object", "no_name", "many", "no_mapping"],
)
def test_extra_is_plain_json_of_bounded_size(extra: object) -> None:
    with pytest.raises(ValueError, match="extra"):
        SamplingParams(extra=extra)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 9e-6])
def test_a_tiny_temperature_is_greedy(temperature):
    """Logits that it divides overflow. Everything that draws tokens compares with 0."""
    assert SamplingParams(temperature=temperature).temperature == 0.0
    assert SamplingParams(temperature=1e-5).temperature == 1e-5
