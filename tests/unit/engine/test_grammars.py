"""Structured output on the bundled model, and its part in the engine on a toy device."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dovetail import LLM, Grammar, RequestError, SamplingParams
from dovetail.core.compose import Capabilities, EngineConfig, Host
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.interfaces import FinishReason, KVGroup
from dovetail.core.testing.reference import default_allocator
from dovetail.core.testing.toy import (
    VOCABULARY,
    ToyCompiler,
    ToyComposition,
    ToyDevice,
    ToyMatcher,
    expected_output,
)
from dovetail.plugins.attention.config import SDPAConfig
from dovetail.plugins.attention.sdpa import capabilities as sdpa

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "size": {"enum": ["s", "m"]},
        "tags": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
OVERRIDES = ["engine.device=cpu", "engine.max_len=80", "engine.max_seqs=8", "grammar.json_whitespace=1"]
PROMPT = "def area(self):\n"


def fits_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        value.keys() == {"name", "size", "tags"}
        and re.fullmatch("[a-z]{1,6}", value["name"]) is not None
        and value["size"] in ("s", "m")
        and len(value["tags"]) <= 2
        and all(tag in range(10) for tag in value["tags"])
    )


FORMS: dict[str, tuple[Grammar, Any]] = {
    "json_schema": (Grammar(kind="json_schema", value=SCHEMA), fits_schema),
    "json_object": (Grammar(kind="json_object"), lambda text: isinstance(json.loads(text), dict)),
    "regex": (Grammar(kind="regex", value=r"(\d{2}|é){2}-[a-f]+x"), re.compile(r"(\d{2}|é){2}-[a-f]+x").fullmatch),
    "choice": (Grammar(kind="choice", value=("yes", "no", "not at all")), ("yes", "no", "not at all").__contains__),
    "lark": (
        Grammar(kind="lark", value='start: "<" start ">" | /[a-z]{1,4}/'),
        re.compile(r"<*[a-z]{1,4}>*").fullmatch,
    ),
    "ebnf": (Grammar(kind="ebnf", value='root ::= [0-9] ("+" [0-9])* "="'), re.compile(r"\d(\+\d)*=").fullmatch),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", overrides=[*OVERRIDES, "engine.depth=2"]) as llm:
        yield llm


def requests(seeds: range) -> list[SamplingParams]:
    """For every seed one request of each form, and one without a grammar."""
    found = []
    for seed in seeds:
        for grammar, _ in FORMS.values():
            found.append(SamplingParams(temperature=1.0, seed=seed, max_tokens=40, grammar=grammar))
        found.append(SamplingParams(temperature=0.8, seed=seed, max_tokens=12, logprobs=1, top_p=0.9))
    return found


def run(llm: LLM, params: list[SamplingParams]) -> list[tuple[str, tuple[int, ...], str | None]]:
    completions = [c for result in llm.generate([PROMPT] * len(params), params) for c in result.completions]
    return [(c.text, tuple(c.token_ids), c.finish_reason) for c in completions]


def test_every_output_fits(llm: LLM) -> None:
    params = requests(range(4))
    ended = dict.fromkeys(FORMS, 0)
    for (text, _, reason), each in zip(run(llm, params), params, strict=True):
        if each.grammar is not None and reason == "stop":
            grammar, fits = FORMS[each.grammar.kind]
            assert fits(text), f"{grammar}: {text!r}"
            ended[grammar.kind] += 1
    assert min(ended.values()) > 0, f"too few outputs were complete: {ended}"
    assert llm.engine.kv.stats().owned == 0


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine.depth=4", "executor.delay=3", "spec_decode=ngram"],
        pytest.param(
            ["engine.depth=2", "engine.mask_wait=0", "engine.kv_pages=8", "engine.token_budget=9"],
            marks=pytest.mark.nightly,
        ),
        pytest.param(["executor=multiproc", "engine.tp=2", "engine.depth=2"], marks=pytest.mark.nightly),
    ],
    ids=["depth 4, drafts", "impatient, preemption", "two ranks"],
)
def test_tokens_are_the_same_in_any_engine(llm: LLM, overrides: list[str]) -> None:
    """Requests without a grammar get the same tokens as in a batch without grammars."""
    params = [p.model_copy(update={"temperature": 0.0}) for p in requests(range(1))]
    expected = run(llm, params)
    free = [p for p in params if p.grammar is None]
    assert [e for e, p in zip(expected, params, strict=True) if p.grammar is None] == run(llm, free)
    with LLM("tiny", overrides=[*OVERRIDES, *overrides]) as other:
        assert run(other, params) == expected
        if "engine.mask_wait=0" in overrides:
            assert other.engine.counters.late_rows > 0
            assert other.engine.scheduler.stats().preemptions > 0


@pytest.mark.nightly
def test_rows_wait_for_masks_if_attention_needs_exact_lengths(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without its mask would be one token shorter than the next plan, already launched, states."""
    known = sdpa.capabilities

    def exact(config: SDPAConfig, host: Host) -> Capabilities:
        found = known(config, host)
        return replace(found, provides={**found.provides, "exact_lengths": "host"})

    monkeypatch.setattr(sdpa, "capabilities", exact)
    params = [p.model_copy(update={"temperature": 0.0}) for p in requests(range(1))]
    impatient = ["engine.depth=2", "engine.mask_wait=0", "engine.kv_pages=8", "engine.token_budget=9"]
    with LLM("tiny", overrides=[*OVERRIDES, *impatient]) as other:
        assert run(other, params) == run(llm, params)
        assert other.engine.counters.late_rows == 0


def test_each_sample_follows_the_grammar_separately(llm: LLM) -> None:
    grammar, fits = FORMS["choice"]
    (result,) = llm.generate(PROMPT, SamplingParams(temperature=1.0, n=6, seed=1, max_tokens=20, grammar=grammar))
    assert all(fits(c.text) and c.finish_reason == "stop" for c in result.completions)
    assert len({c.text for c in result.completions}) > 1, "all six samples are the same"


def test_the_model_decides_where_a_complete_output_ends(llm: LLM) -> None:
    """End-of-sequence and stop tokens are allowed where the grammar may end, and nowhere else."""
    grammar = Grammar(kind="regex", value="(ab)+")
    stop = llm.tokenizer.encode("q", special=False)
    assert len(stop) == 1
    bias = {stop[0]: 100.0}
    # Greedy, since a sample such as "a", "ba", "b" would be correct as well and end later.
    greedy = SamplingParams(temperature=0.0, grammar=grammar, max_tokens=9, logit_bias=bias)
    (result,) = llm.generate(PROMPT, greedy.model_copy(update={"stop_token_ids": tuple(stop)}))
    assert (result.text, result.completions[0].finish_reason) == ("ab", "stop")
    (result,) = llm.generate(PROMPT, greedy.model_copy(update={"ignore_eos": True}))
    assert re.fullmatch("(ab)+a?", result.text) and result.completions[0].finish_reason == "length"


def test_an_output_that_its_last_token_completes_ends_by_stop(llm: LLM) -> None:
    grammar = Grammar(kind="choice", value=("no",))
    tokens = llm.generate(PROMPT, SamplingParams(grammar=grammar))[0].token_ids
    (result,) = llm.generate(PROMPT, SamplingParams(grammar=grammar, max_tokens=len(tokens)))
    assert (result.text, result.completions[0].finish_reason) == ("no", "stop")


def test_logprobs_are_those_without_the_mask(llm: LLM) -> None:
    """Forbidden tokens may still be among the most likely ones."""
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, grammar=Grammar(kind="choice", value=("zzzz",)))
    (masked,) = llm.generate(PROMPT, params)
    (free,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=1, logprobs=3))
    first = masked.completions[0].logprobs[0]
    assert first.top == free.completions[0].logprobs[0].top
    assert first.logprob < first.top[-1][1]


WRONG = {
    "not a schema": (Grammar(kind="json_schema", value={"type": "thing"}), "json_schema.*thing"),
    "not a regex": (Grammar(kind="regex", value="(?=a)a"), "regex.*look-around"),
    "nothing fits": (Grammar(kind="json_schema", value=False), "json_schema"),
    "endless": (Grammar(kind="json_schema", value={"$ref": "#"}), "json_schema"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_grammar_fails_only_its_request(llm: LLM, wrong: str) -> None:
    grammar, reason = WRONG[wrong]
    free = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    expected = llm.generate(PROMPT, free)[0].token_ids

    async def both() -> tuple[Any, Any]:
        bad = llm.agenerate(PROMPT, SamplingParams(grammar=grammar, n=2))
        return await asyncio.gather(llm.agenerate(PROMPT, free), bad, return_exceptions=True)  # type: ignore[return-value]

    good, bad = asyncio.run(both())
    assert good.token_ids == expected
    assert isinstance(bad, RequestError) and re.search(reason, str(bad)), bad
    assert llm.engine.kv.stats().owned == 0


def test_a_request_with_no_token_left_fails(llm: LLM) -> None:
    """min_tokens forbids the only token that the grammar allows."""
    braces = tuple(t for t in range(llm.tokenizer.vocab) if set(llm.tokenizer.decode([t])) == {"}"})
    grammar = Grammar(kind="regex", value=r"\}{20}")
    params = SamplingParams(grammar=grammar, min_tokens=30, max_tokens=40, stop_token_ids=braces)
    with pytest.raises(RequestError, match="grammar"):
        llm.generate(PROMPT, params)


def test_without_the_part_grammars_are_refused() -> None:
    with LLM("tiny", overrides=["engine.device=cpu", "engine.kv_pages=8", "grammar=none"]) as llm:
        with pytest.raises(RequestError, match="grammar=none"):
            llm.generate("x", SamplingParams(grammar=Grammar(kind="json_object")))
        assert llm.generate("x", SamplingParams(max_tokens=2))[0].token_ids


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "choice", "value": "yes"},
        {"kind": "choice", "value": ["yes", ""]},
        {"kind": "json_object", "value": "{}"},
        {"kind": "regex"},
        {"kind": "regex", "value": ["a"]},
        {"kind": "regex", "value": "a" * (1 << 20) + "a"},
        {"kind": "json_schema", "value": {"a": {1, 2}}},
        {"kind": "grammar", "value": "x"},
    ],
)
def test_invalid_grammar_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        SamplingParams(grammar=fields)  # type: ignore[arg-type]


# The engine on a toy device.


class Held(ToyCompiler):
    """Compiles when `may_compile` is set, and computes masks after the first when `may_mask` is set."""

    may_compile = threading.Event()
    may_mask = threading.Event()

    def compile(self, grammar: Grammar) -> ToyMatcher:
        assert self.may_compile.wait(20)
        return HeldMatcher(*map(int, grammar.value.split(":")))  # type: ignore[union-attr]


class HeldMatcher(ToyMatcher):
    def mask(self, out: Any) -> None:
        assert not self.output or Held.may_mask.wait(20)
        super().mask(out)

    def fork(self) -> ToyMatcher:
        return HeldMatcher(self.salt, self.length, self.output)


@pytest.fixture(params=[1, 2, 4])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    device = ToyDevice([KVGroup(0, (0,), page_tokens=4)], {0: 60}, max_seqs=4, max_len=64, delay=request.param - 1)
    config = EngineConfig(max_seqs=4, max_len=64, token_budget=16, depth=request.param, mask_wait=0.0)
    composition = ToyComposition(
        lambda limits, kv: PolicyScheduler(None, limits, kv), default_allocator, device, config
    )
    Held.may_compile.clear()
    Held.may_mask.clear()
    composition.build = lambda kind, build=composition.build, **given: (  # type: ignore[method-assign]
        Held(None, VOCABULARY) if kind == "grammar" else build(kind, **given)
    )
    engine = start_engine(composition)  # type: ignore[arg-type]
    yield engine
    Held.may_compile.set()
    Held.may_mask.set()
    engine.shutdown()


GRAMMAR = Grammar(kind="regex", value="3:9")
FREE = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
BOUND = SamplingParams(temperature=0, max_tokens=20, grammar=GRAMMAR)


def drive(engine: Engine, uids: set[int]) -> dict[int, list[int]]:
    """Step until these sequences have ended. Return the outputs."""
    outputs: dict[int, list[int]] = {}
    deadline = time.monotonic() + 60
    while uids:
        assert time.monotonic() < deadline
        for event in engine.step():
            outputs.setdefault(event.uid, []).extend(event.tokens)
            if event.reason is not None:
                uids.discard(event.uid)
                assert event.reason is not FinishReason.REJECTED, event.detail
    return outputs


def test_other_requests_wait_neither_for_a_compiler_nor_for_a_mask(engine: Engine) -> None:
    (bound,) = engine.add([1, 2, 3], BOUND)
    (free,) = engine.add([4, 5], FREE)
    outputs = drive(engine, {free.uid})
    assert outputs == {free.uid: expected_output([4, 5], 20, 64, ignore_eos=True)}
    Held.may_compile.set()
    while bound.known_len == 3:
        engine.step()
    (free,) = engine.add([6], FREE)
    outputs = drive(engine, {free.uid})
    assert outputs[free.uid] == expected_output([6], 20, 64, ignore_eos=True)
    assert bound.known_len == 4, "its mask is missing"
    assert engine.counters.late_rows > 10
    Held.may_mask.set()
    drive(engine, {bound.uid})
    assert bound.tokens[3:] == expected_output([1, 2, 3], 20, 64, grammar=GRAMMAR)


def test_aborts_at_any_time(engine: Engine) -> None:
    """While the grammar compiles, while a mask is missing, and of one of several samples."""
    aborted = engine.add([1, 2], BOUND.model_copy(update={"n": 2}))
    kept = engine.add([1, 2, 3], BOUND.model_copy(update={"n": 2}))
    engine.step()
    for seq in (*aborted, kept[0]):
        engine.abort(seq.uid)
    Held.may_compile.set()
    while kept[1].known_len == 3:
        engine.step()
    (other,) = engine.add([7], BOUND)
    while other.known_len == 1:
        engine.step()
    engine.abort(other.uid)
    Held.may_mask.set()
    drive(engine, {kept[1].uid})
    while engine.has_work:
        engine.step()
    assert kept[1].tokens[3:] == expected_output([1, 2, 3], 20, 64, grammar=GRAMMAR)
    assert engine.kv.stats().owned == 0


def test_a_compiler_that_takes_too_long(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Held, "timeout", 0.05)
    (bound,) = engine.add([1, 2, 3], BOUND)
    events: list[Any] = []
    while engine.has_work:
        events += engine.step()
    (event,) = events
    assert (event.uid, event.reason) == (bound.uid, FinishReason.REJECTED)
    assert "0.05 s" in event.detail


def test_a_grammar_that_delays_the_step_loop_is_rejected(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = HeldMatcher.advance

    def slow(self: HeldMatcher, token: int) -> None:
        time.sleep(0.4 if self.salt == 3 else 0.002)
        advance(self, token)

    monkeypatch.setattr(HeldMatcher, "advance", slow)
    Held.may_compile.set()
    Held.may_mask.set()
    (bound,) = engine.add([1, 2, 3], BOUND)
    (other,) = engine.add([1, 2], BOUND.model_copy(update={"grammar": Grammar(kind="regex", value="4:9")}))
    last: dict[int, Any] = {}
    while engine.has_work:
        last |= {event.uid: event for event in engine.step()}
    assert last[bound.uid].reason is FinishReason.REJECTED and "delayed all requests by" in last[bound.uid].detail
    assert last[other.uid].reason is FinishReason.STOP
