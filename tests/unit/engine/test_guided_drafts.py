"""Rows with a grammar that verify drafts: their output is that of plain decoding."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest

from dovetail import LLM, Grammar, SamplingParams
from dovetail.core.compose import EngineConfig
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.interfaces import Content, FinishReason, KVGroup, Reasoning
from dovetail.core.testing.reference import default_allocator
from dovetail.core.testing.toy import VOCABULARY, ToyCompiler, ToyComposition, ToyDevice, ToyMatcher
from dovetail.plugins.reasoning_parser.config import ThinkConfig
from dovetail.plugins.reasoning_parser.think import ThinkParser

pytestmark = pytest.mark.nightly

OVERRIDES = ["engine.device=cpu", "engine.max_len=96", "engine.max_seqs=8", "grammar.json_whitespace=1"]
PROMPT = "def area(self):\n"
CONSTANT = "return self.width * self.height"
SCHEMA = {
    "type": "object",
    "properties": {"description": {"enum": ["s", "m"]}, "dimensions": {"type": "array", "items": {"type": "integer"}}},
    "required": ["description", "dimensions"],
    "additionalProperties": False,
}
FORMS = (
    Grammar(kind="json_schema", value=SCHEMA),
    Grammar(kind="choice", value=(CONSTANT, "no")),
    Grammar(kind="regex", value="(ab|c){3,9}d"),
)
Outcome = tuple[tuple[int, ...], str | None]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("tiny", overrides=OVERRIDES) as llm:
        yield llm


@pytest.fixture(scope="module", params=[1, 2] if os.environ.get("DOVETAIL_GRID") == "pairs" else [2])
def drafting(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("tiny", overrides=[*OVERRIDES, "spec_decode=ngram", f"engine.depth={request.param}"]) as llm:
        yield llm


def run(llm: LLM, params: list[SamplingParams], prompt: str = PROMPT) -> list[Outcome]:
    completions = [c for result in llm.generate([prompt] * len(params), params) for c in result.completions]
    return [(tuple(c.token_ids), c.finish_reason) for c in completions]


def test_the_output_is_that_of_plain_decoding(plain: LLM, drafting: LLM) -> None:
    """Greedy and seeded, with penalties and log-probabilities, beside a row without a grammar."""
    each: list[dict[str, Any]] = [{"temperature": 0.0, "repetition_penalty": 1.3}, {"temperature": 0.9, "seed": 3}]
    params = [SamplingParams(max_tokens=20, logprobs=1, grammar=form, **given) for form in FORMS for given in each]
    params.append(SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert run(drafting, params) == run(plain, params)
    assert drafting.engine.kv.stats().owned == 0


def test_expected_tokens_are_drafts(plain: LLM, drafting: LLM) -> None:
    """An output with one possible text takes few steps, and ends inside a draft."""
    params = SamplingParams(grammar=Grammar(kind="choice", value=(CONSTANT,)), max_tokens=60)
    expected = run(plain, [params])
    before = drafting.engine.counters.steps, drafting.engine.counters.accepted
    assert run(drafting, [params]) == expected
    assert expected[0][1] == "stop" and len(expected[0][0]) > 8
    steps, accepted = (drafting.engine.counters.steps - before[0], drafting.engine.counters.accepted - before[1])
    assert steps < len(expected[0][0]) and accepted >= 4, (steps, accepted)


def test_a_stop_token_inside_a_draft_ends_the_output(plain: LLM, drafting: LLM) -> None:
    (line,) = plain.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=12))[0].completions
    stop = line.token_ids[6]
    prompt = PROMPT + line.text + "\n" + PROMPT
    anything = Grammar(kind="regex", value="(.|\n)*")
    params = [SamplingParams(temperature=0.0, max_tokens=20, grammar=anything, stop_token_ids=(stop,))]
    expected = run(plain, params, prompt)
    assert expected[0][1] == "stop"
    accepted = drafting.engine.counters.accepted
    assert run(drafting, params, prompt) == expected
    assert drafting.engine.counters.accepted > accepted


def test_the_end_of_reasoning_inside_a_draft(plain: LLM, drafting: LLM) -> None:
    """One delta has the end of the reasoning and the begin of the answer."""
    text = "<think>if self: return</think>return self.width"
    params = SamplingParams(grammar=Grammar(kind="choice", value=(text,)), max_tokens=60)
    for llm in (plain, drafting):
        parser = ThinkParser(ThinkConfig()).stream(PROMPT)
        deltas = [delta for delta in llm.stream(PROMPT, params) if delta.text]
        events = [event for delta in deltas for event in parser.feed(delta.text)] + parser.finish()
        found = ("".join(event.text for event in events if isinstance(event, kind)) for kind in (Reasoning, Content))
        assert tuple(found) == ("if self: return", "return self.width")
    whole = "".join(delta.text for delta in deltas)
    ends = list(accumulate(len(delta.text) for delta in deltas))
    assert whole == text and whole.index("return self") not in ends


# On a toy device, whose drafts are right or wrong by a hash.


class Silent(ToyMatcher):
    """Shows only by an empty mask that nothing may follow."""

    def allowed(self) -> set[int]:
        return set() if len(self.output) == self.length else super().allowed()

    finished = property(lambda self: False)  # type: ignore[assignment]

    def fork(self) -> ToyMatcher:
        return Silent(self.salt, self.length, self.output)


class SilentCompiler(ToyCompiler):
    def compile(self, grammar: Grammar) -> ToyMatcher:
        salt, _, length = str(grammar.value).partition(":")
        return Silent(int(salt), int(length))


def outcomes(lookahead: int, depth: int) -> dict[int, tuple[list[int], FinishReason, str]]:
    device = ToyDevice(
        [KVGroup(0, (0,), page_tokens=4)], {0: 60}, max_seqs=4, max_len=64, delay=depth - 1, lookahead=lookahead
    )
    config = EngineConfig(max_seqs=4, max_len=64, token_budget=16, depth=depth, mask_wait=0.01)
    composition = ToyComposition(
        lambda limits, kv: PolicyScheduler(None, limits, kv), default_allocator, device, config
    )
    build = composition.build

    def built(kind: str, **given: Any) -> Any:
        return SilentCompiler(None, VOCABULARY) if kind == "grammar" else build(kind, **given)

    composition.build = built  # type: ignore[method-assign]
    engine: Engine = start_engine(composition)  # type: ignore[arg-type]
    tokens: dict[int, list[int]] = {}
    ends: dict[int, tuple[FinishReason, str]] = {}
    for i in range(8):
        params = SamplingParams(
            temperature=0, max_tokens=20, ignore_eos=i % 2 > 0, grammar=Grammar(kind="regex", value=f"{i}:{3 + i}")
        )
        (seq,) = engine.add([1 + i, 2, 3], params)
        tokens[seq.uid] = []
    while engine.has_work:
        for event in engine.step():
            tokens[event.uid] += event.tokens
            if event.reason is not None:
                ends[event.uid] = event.reason, event.detail
    accepted = engine.counters.accepted
    engine.shutdown()
    assert bool(accepted) is bool(lookahead)
    return {uid: (tokens[uid], *end) for uid, end in ends.items()}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_draft_that_nothing_may_follow(depth: int) -> None:
    """The output ends there as without drafts: complete, or refused with the reason."""
    expected = outcomes(0, 1)
    assert {reason for _, reason, _ in expected.values()} >= {FinishReason.STOP, FinishReason.REJECTED}
    assert outcomes(4, depth) == expected
