"""Contract suite for every built-in workload."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import Workload, WorkloadContext
from dovetail.core.testing.workload import WorkloadContract
from dovetail.plugins.workload.chats import Chats
from dovetail.plugins.workload.config import (
    ChatsConfig,
    FixedConfig,
    PoissonConfig,
    SharedPrefixConfig,
    ShareGPTConfig,
    TextConfig,
    TraceConfig,
)
from dovetail.plugins.workload.files import ShareGPT, Trace
from dovetail.plugins.workload.synthetic import Fixed, Poisson, SharedPrefix
from dovetail.plugins.workload.text import Text


class TestFixed(WorkloadContract):
    def make(self) -> Workload:
        return Fixed(FixedConfig())


class TestPoisson(WorkloadContract):
    def make(self) -> Workload:
        return Poisson(PoissonConfig(rates=(2.0, 16.0), seconds=40, at_least=100, prompt_tokens=8))


class TestSharedPrefix(WorkloadContract):
    def make(self) -> Workload:
        return SharedPrefix(SharedPrefixConfig(requests=20))


class TestSharedPrefixOfManyLengths(WorkloadContract):
    def make(self) -> Workload:
        return SharedPrefix(SharedPrefixConfig(requests=20, range_ratio=0.5))


def test_a_range_of_lengths_keeps_the_prefix_and_the_mean() -> None:
    ctx, many = WorkloadContext(vocab=100, max_len=2000, seed=3), 4000
    shapes = {"shared_tokens": 8, "own_tokens": 100, "output_tokens": 20}
    found = SharedPrefix(SharedPrefixConfig(requests=many, range_ratio=0.5, **shapes)).requests(ctx)
    (plain,) = SharedPrefix(SharedPrefixConfig(requests=1, **shapes)).requests(ctx)
    assert {request.prompt_ids[:8] for request in found} == {plain.prompt_ids[:8]}
    own, outputs = [len(request.prompt_ids) - 8 for request in found], [request.output_tokens for request in found]
    assert (min(own), max(own), min(outputs), max(outputs)) == (50, 150, 10, 30)
    assert 98 < sum(own) / many < 102 and 19.5 < sum(outputs) / many < 20.5


CHAT: dict[str, Any] = {"message": {"median": 40, "sigma": 1.0, "most": 200}, "output": {"median": 20}}


class TestChats(WorkloadContract):
    def make(self) -> Workload:
        return Chats(ChatsConfig(rates=(2.0, 16.0), seconds=40, at_least=100, **CHAT))


class TestBursts(WorkloadContract):
    def make(self) -> Workload:
        return Chats(ChatsConfig(rates=(16.0,), burstiness=0.25, seconds=40, at_least=100, **CHAT))


def test_bursts_have_the_rate_and_the_stated_variation() -> None:
    ctx = WorkloadContext(vocab=100, max_len=2000, seed=3, rate=20.0)
    for shape in (1.0, 0.25):
        config = ChatsConfig(rates=(20.0,), burstiness=shape, seconds=200, message={"median": 1}, output={"median": 1})
        times = [request.arrival for request in Chats(config).requests(ctx)]
        gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
        mean = statistics.mean(gaps)
        assert abs(mean * 20 - 1) < 0.1, "the rate"
        assert abs(statistics.stdev(gaps) / mean * shape**0.5 - 1) < 0.15, "the coefficient of variation"


class TestText(WorkloadContract):
    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "text.txt"
        self.path.write_text("".join(chr(97 + i % 23) for i in range(400)))

    def make(self) -> Workload:
        return Text(TextConfig(path=str(self.path), prompt_tokens=20, output_tokens=5))


def test_prompts_are_cut_from_the_text_behind_what_begins_one(tmp_path: Path) -> None:
    def encode(text: str) -> list[int]:
        return [1, *(ord(char) for char in text)]

    path = tmp_path / "text.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz" * 9)
    ctx = WorkloadContext(vocab=200, max_len=50, seed=3, encode=encode)
    config = TextConfig(path=str(path), requests=30, prompt_tokens=10, sampling={"temperature": 0.5})
    found = Text(config.model_copy(update={"output_tokens": 4})).requests(ctx)
    assert {request.prompt_ids[0] for request in found} == {1} and {len(r.prompt_ids) for r in found} == {11}
    assert all("".join(map(chr, r.prompt_ids[1:])) in path.read_text() for r in found)
    assert len({r.prompt_ids for r in found}) > 10 and found[0].sampling.temperature == 0.5
    long = TextConfig(path=str(path), prompt_tokens=300, output_tokens=4)
    with pytest.raises(ConfigError, match="the text has only 234 tokens"):
        Text(long).requests(WorkloadContext(vocab=200, max_len=999, seed=3, encode=encode))
    with pytest.raises(ConfigError, match="there is no tokenizer"):
        Text(config).requests(WorkloadContext(vocab=200, max_len=999, seed=3))
    with pytest.raises(ConfigError, match=r"workload.path=.*none.txt: cannot be read"):
        Text(TextConfig(path=str(tmp_path / "none.txt"))).requests(ctx)


class TestConversations(WorkloadContract):
    def make(self) -> Workload:
        schema = {"type": "array", "minItems": 20, "items": {"type": "integer"}}
        return Chats(ChatsConfig(conversations=6, rounds=4, shared_tokens=50, pause=0.5, json_schema=schema, **CHAT))


def test_lengths_are_log_normal_and_conversations_grow() -> None:
    ctx, many = WorkloadContext(vocab=100, max_len=2000, seed=3), 1500
    config = ChatsConfig(conversations=many, rounds=2, shared_tokens=8, pause=0.5, sampling={"top_p": 0.9}, **CHAT)
    found = Chats(config).requests(ctx)
    first, second = found[::2], found[1::2]
    assert len({request.prompt_ids[:8] for request in first}) == 1 and len({r.prompt_ids[:8] for r in second}) > 1
    logs = [math.log(length) for r in first if (length := len(r.prompt_ids) - 8) < 200]
    assert max(map(len, (r.prompt_ids for r in second))) <= 200 and abs(math.exp(statistics.median(logs)) - 40) < 4
    assert 0.82 < statistics.stdev(logs) < 0.95, "the longest 5 % are drawn again"
    assert [(r.continues, r.arrival) for r in found[:4]] == [(None, 0.0), (0, 0.5), (None, 0.0), (2, 0.5)]
    assert {r.output_tokens for r in found} == {20} and {r.sampling.top_p for r in found} == {0.9}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"message": {"median": 9, "sigma": 1.0}}, "sigma=1 has no greatest number of tokens: set most"),
        ({"output": {"median": 9, "most": 8}}, "most=8 is less than median=9"),
        ({"sampling": {"max_tokens": 3}}, "max_tokens: set by the run"),
        ({"sampling": {"temperatures": 1}}, "Did you mean `temperature`"),
    ],
)
def test_wrong_options_of_chats_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ChatsConfig(**options)


class TestTrace(WorkloadContract):
    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "trace.jsonl"
        lines = [{"prompt_ids": [1, 2, 3], "output_tokens": 4 + i, "arrival": (9 - i) / 2} for i in range(9)]
        self.path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")

    def make(self) -> Workload:
        return Trace(TraceConfig(path=str(self.path)))


class TestShareGPT(WorkloadContract):
    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "sharegpt.json"
        talks = [
            [{"from": "human", "value": f"What is {i} and why?"}, {"from": "gpt", "value": "A number. " * (1 + i % 7)}]
            for i in range(60)
        ]
        talks += [[], [{"from": "gpt", "value": "begins"}, {"from": "human", "value": "wrongly"}]]
        self.path.write_text(json.dumps([{"id": str(i), "conversations": talk} for i, talk in enumerate(talks)]))

    def make(self) -> Workload:
        return ShareGPT(ShareGPTConfig(path=str(self.path), requests=50, rates=(5.0,)))
