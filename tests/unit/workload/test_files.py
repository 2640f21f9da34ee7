"""Workload files are untrusted: errors name the file and the line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from dovetail.core.compose import compose, installed
from dovetail.core.compose.sources import open_sources
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import TimedRequest, WorkloadContext

CTX = WorkloadContext(vocab=50, max_len=64, seed=0, encode=lambda text: [1] * len(text.split()))
GOOD = {"prompt_ids": [1, 2], "output_tokens": 3}


def requests(*overrides: str, ctx: WorkloadContext = CTX) -> list:
    return list(compose(overrides, app="bench").build("workload").requests(ctx))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ":2: "),
        (json.dumps(GOOD | {"prompt_ids": []}), "prompt_ids"),
        (json.dumps(GOOD | {"prompt_ids": [1, -1]}), "prompt_ids.1"),
        (json.dumps(GOOD | {"prompt_ids": [1, 50]}), "vocabulary of 50"),
        (json.dumps(GOOD | {"output_tokens": 0}), "output_tokens"),
        (json.dumps(GOOD | {"output_tokens": 63}), "context of 64"),
        (json.dumps(GOOD | {"arrival": -1}), "arrival"),
        (json.dumps(GOOD | {"arrives": 1}), "arrives"),
        (json.dumps(GOOD | {"pooling": "last"}), "pooling"),
        (json.dumps(GOOD | {"deadline": 0}), "deadline"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=f"{file}:2") as caught:
        requests("workload=trace", f"workload.path={file}")
    assert words in str(caught.value)


def test_a_line_of_a_trace_carries_all_options(tmp_path: Path) -> None:
    options = {"priority": 1, "deadline": 2.5, "user": "ann", "cache_salt": "s", "hints": {"a": 1.0}, "adapter": "sql"}
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(GOOD | options | {"arrival": 4.0}))
    (request,) = requests("workload=trace", f"workload.path={file}", "workload.speed=2")
    assert request == TimedRequest((1, 2), 3, 2.0, **options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "not JSON"),
        ("{}", "expected a list of conversations, not dict"),
        ("[1]", "conversation 0"),
        ('[{"conversations": [{"from": "human", "value": 3}]}]', "conversation 0: a turn"),
        ("[]", "has 0 conversations"),
    ],
)
def test_a_bad_sharegpt_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "sharegpt.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        requests("workload=sharegpt", f"workload.path={file}")
    assert words in str(caught.value) and str(file) in str(caught.value)


def test_a_file_that_cannot_be_read_is_not_called_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        requests("workload=sharegpt", f"workload.path={tmp_path}")
    assert "cannot be read" in str(caught.value) and "JSON" not in str(caught.value)


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ("[]", "workload.rates=[]: should have at least 1 item, not 0."),
        ("[0]", "workload.rates.0=0: should be greater"),
    ],
)
def test_rates_that_are_refused_are_one_mistake(rates: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        requests("workload=poisson", f"workload.rates={rates}")
    assert str(caught.value).startswith(words)


def test_sharegpt_takes_first_questions_with_the_lengths_of_their_answers(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    talks = [
        [("human", "a b c d e"), ("gpt", "f g h i"), ("human", "a b c d e f"), ("gpt", "a b c d e f")],
        [("human", "too short"), ("gpt", "a b c d e")],
        [("human", "a b c d " * 20), ("gpt", "too long a b c")],
    ]
    file.write_text(
        json.dumps([{"conversations": [{"from": who, "value": text} for who, text in talk]} for talk in talks])
    )
    (request,) = requests("workload=sharegpt", f"workload.path={file}", "workload.requests=1")
    assert (len(request.prompt_ids), request.output_tokens) == (5, 4)


def test_a_missing_file_and_a_missing_tokenizer_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        requests("workload=trace", f"workload.path={tmp_path / 'none'}")
    file = tmp_path / "sharegpt.json"
    file.write_text('[{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]')
    with pytest.raises(ConfigError, match="there is no tokenizer; use a model folder"):
        requests("workload=sharegpt", f"workload.path={file}", ctx=WorkloadContext(50, 64, 0))


SIZES = {
    "latency": (1, 512, 256),
    "batch64": (64, 512, 256),
    "batch256": (256, 512, 256),
    "throughput": (1000, 512, 256),
    "long": (32, 8192, 256),
    "shared_prefix": (512, 1000, 128),
}
BIG = WorkloadContext(vocab=1000, max_len=9000, seed=0)


@pytest.mark.parametrize("name", SIZES)
def test_named_workloads_have_their_sizes(name: str) -> None:
    found = requests(f"workload={name}", ctx=BIG)
    count, prompt, output = SIZES[name]
    assert len(found) == count and {r.arrival for r in found} == {0.0}
    assert {(len(r.prompt_ids), r.output_tokens) for r in found} == {(prompt, output)}


RANGES = {"system_prompt": (512, 800, 100, 256), "system_prompt_small": (24, 800, 64, 32)}


@pytest.mark.parametrize("name", RANGES)
def test_named_workloads_with_many_lengths(name: str) -> None:
    count, shared, own, output = RANGES[name]
    found = requests(f"workload={name}", ctx=BIG)
    assert len(found) == count and len({request.prompt_ids[:shared] for request in found}) == 1
    assert {r.arrival for r in found} == {0.0} and len({r.output_tokens for r in found}) > 10
    assert all(0.25 * own <= len(r.prompt_ids) - shared <= 1.75 * own for r in found)
    assert all(0.25 * output <= r.output_tokens <= 1.75 * output for r in found)


CONVERSATIONS = {"chat": (256, 1, 220, 190), "multi_turn": (40, 6, 115, 170), "agents": (256, 1, 6060, 48)}
"""Conversations, rounds, and the medians that the variant's description states."""


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_named_conversations_have_their_rounds_and_medians(name: str) -> None:
    count, rounds, prompt, output = CONVERSATIONS[name]
    found = requests(f"workload={name}", ctx=BIG)
    assert len(found) == count * rounds and {r.arrival for r in found} == {0.0}
    previous = [None if index % rounds == 0 else index - 1 for index in range(len(found))]
    assert [request.continues for request in found] == previous
    seeds = range(1 if name == "agents" else 6)  # Its lengths hardly differ.
    many = [r for seed in seeds for r in requests(f"workload={name}", ctx=replace(BIG, seed=seed))]
    assert median(len(r.prompt_ids) for r in many) == pytest.approx(prompt, rel=0.05)
    assert median(r.output_tokens for r in many) == pytest.approx(output, rel=0.05)
    assert len({len(r.prompt_ids) for r in found}) > 50
    (sampling,) = {(r.sampling.temperature, r.sampling.top_p, r.sampling.grammar is None) for r in found}
    assert sampling == ((0.0, 1.0, False) if name == "agents" else (0.8, 0.95, True))


def test_agents_share_their_prefix_and_nothing_else() -> None:
    prompts = [request.prompt_ids for request in requests("workload=agents", ctx=BIG)]
    assert len({ids[:6000] for ids in prompts}) == 1 and len({ids[6000:] for ids in prompts}) == 256


@pytest.mark.parametrize("name", ["online", "chat_online"])
def test_online_is_a_load_curve(name: str) -> None:
    workload = compose([f"workload={name}"], app="bench").build("workload")
    assert workload.rates() == (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


def test_chats_arrive_at_their_rate_with_the_lengths_of_chat() -> None:
    found = requests("workload=chat_online", ctx=replace(BIG, rate=8.0))
    assert found[-1].arrival / len(found) == pytest.approx(1 / 8, rel=0.15) and len(found) == 8 * 60
    arrivals = [request.arrival for request in found]
    assert arrivals == sorted(arrivals) and len(set(arrivals)) == len(arrivals)
    chats = requests("workload=chat", ctx=BIG)
    lengths = [(len(request.prompt_ids), request.output_tokens) for request in found]
    assert lengths[: len(chats)] == [(len(request.prompt_ids), request.output_tokens) for request in chats]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["workload=chat", "workload.seconds=5"], "seconds=5 is for arrivals at a rate: set rates, or seconds=null"),
        (["workload=chat", "workload.burstiness=0.5"], "burstiness=0.5 is for arrivals at a rate"),
        (["workload=chat_online", "workload.rates=[]"], "seconds=60 is for arrivals at a rate"),
        (["workload=chat", "workload.pause=3"], "pause=3 is between rounds, and rounds is 1"),
    ],
)
def test_options_without_effect_are_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        compose(words, app="bench")


def test_prompts_of_shared_prefix_share_it_and_nothing_else() -> None:
    first, second, *_ = requests("workload=shared_prefix", ctx=BIG)
    assert first.prompt_ids[:800] == second.prompt_ids[:800]
    assert first.prompt_ids[800:] != second.prompt_ids[800:]


def test_every_variant_is_tried_here() -> None:
    from dovetail.core.compose.sources import Repository, hydra_1_3

    with hydra_1_3():
        options = Repository(open_sources(installed(), ())[1]).get_group_options("workload")
    # tests/unit/app/test_replay.py has recordings.
    others = {"online", "chat_online", "fixed", "poisson", "chats", "sharegpt", "trace", "recording", "text"}
    assert set(options) == {*SIZES, *RANGES, *CONVERSATIONS, *others}
