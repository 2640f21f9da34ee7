"""Checking processes for grammars: what ends them, what they refuse, and what the cache keeps."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, Grammar, RequestError, SamplingParams
from dovetail.core.engine import grammars as grammars_module
from dovetail.core.engine.grammars import Grammars
from dovetail.core.parallel.grammar_check import CompiledGrammar, GrammarChecker
from dovetail.core.testing.toy import VOCABULARY, ToyCompiler, ToyMatcher

COMPONENT = """
import ctypes, time
from dovetail import Config, RequestError
from dovetail.core.interfaces import GrammarCompiler, Matcher

class Options(Config):
    pass

class Any(Matcher):
    accepting = finished = False
    def mask(self, out):
        out[:] = 0xFFFFFFFF
    def advance(self, token):
        pass
    def rollback(self, tokens):
        pass
    def fork(self):
        return self

class Fragile(GrammarCompiler):
    def compile(self, grammar):
        if grammar.value == "crash":
            ctypes.string_at(0)
        if grammar.value == "hang":
            time.sleep(60)
        if grammar.value == "memory":
            bytearray(1 << 30)
        if grammar.value == "refuse":
            raise RequestError("grammar: no", status=422)
        if grammar.value == "raise":
            raise KeyError("boom")
        matcher = Any()
        matcher.data = bytes(1 << 22) if grammar.value == "large" else b""
        return matcher
"""


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "fragile_grammars.py").write_text(COMPONENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    return {
        "target": "fragile_grammars:Fragile",
        "config": "fragile_grammars:Options",
        "options": "{}",
        "vocabulary": [VOCABULARY.size, VOCABULARY.eos_ids, None],
        "memory": 64 << 20,
    }


def test_what_ends_the_process_is_refused_and_the_next_grammar_is_compiled(order: dict[str, Any]) -> None:
    checker = GrammarChecker(order, timeout=5.0)
    refusals = {
        "crash": "too deep or too large",
        "refuse": "grammar: no",
        "raise": "its component failed: KeyError: 'boom'",
        "hang": "not compiled within 0.2 s",
    }
    if sys.platform == "linux":
        refusals["memory"] = "more than 64 MiB of memory"
    try:
        for value, reason in refusals.items():
            small = checker.check(Grammar(kind="regex", value="small"))
            checker._timeout = 0.2 if value == "hang" else 5.0
            with pytest.raises(RequestError, match=reason):
                checker.check(Grammar(kind="regex", value=value))
            checker._timeout = 5.0
        assert checker.check(Grammar(kind="regex", value="large")) > small + (1 << 22) - 4096
    finally:
        checker.close()
    assert checker._process is None
    with pytest.raises(RequestError, match="stops"):
        checker.check(Grammar(kind="regex", value="small"))


def test_closing_ends_a_check_that_runs(order: dict[str, Any]) -> None:
    checker, raised = GrammarChecker(order, timeout=60.0), []

    def check() -> None:
        try:
            checker.check(Grammar(kind="regex", value="hang"))
        except RequestError as error:
            raised.append(str(error))

    thread = threading.Thread(target=check)
    thread.start()
    while checker._process is None:
        time.sleep(0.01)
    checker.close()
    thread.join(20)
    assert raised == ["grammar: the engine stops"] and checker._process is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems end a process at its next message")
def test_the_process_ends_with_an_engine_that_is_killed(order: dict[str, Any]) -> None:
    program = (
        "import json, sys\n"
        "sys.path[:] = json.loads(sys.argv[2])\n"
        "from dovetail.core.parallel.grammar_check import GrammarChecker\n"
        "from dovetail.core.interfaces import Grammar\n"
        "checker = GrammarChecker(json.loads(sys.argv[1]), 30.0)\n"
        "checker.check(Grammar(kind='regex', value='small'))\n"
        "print(checker._process[0].pid, flush=True)\n"
        "checker.check(Grammar(kind='regex', value='hang'))\n"
    )
    command = [sys.executable, "-c", program, json.dumps(order), json.dumps(sys.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        engine.send_signal(signal.SIGKILL)
    status = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 20
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline, "the checking process outlives its engine"
        time.sleep(0.02)


# The built-in component.


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", overrides=["engine.device=cpu", "engine.max_len=80", "engine.max_seqs=2"]) as llm:
        yield llm


def refs(depth: int) -> str:
    steps: dict[str, object] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(depth)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**steps, f"d{depth}": {"type": "string"}}})


def rules(depth: int) -> str:
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(depth)) + f'r{depth}: "a"\n'


KILLERS = {
    "a chain of references": Grammar(kind="json_schema", value=refs(3000)),
    "a chain of rules": Grammar(kind="lark", value=rules(3000)),
    "arguments of a tool": Grammar(kind="lark", value=f"start: %json {refs(3000)}"),
}


@pytest.mark.parametrize("killer", KILLERS)
def test_a_grammar_that_overflows_the_stack_fails_only_its_request(llm: LLM, killer: str) -> None:
    with pytest.raises(RequestError, match="too deep or too large"):
        llm.generate("x", SamplingParams(grammar=KILLERS[killer]))
    moderate = Grammar(kind="json_schema", value=refs(200))
    assert llm.generate("x", SamplingParams(grammar=moderate, max_tokens=3))[0].token_ids


def test_a_grammar_that_takes_too_much_memory_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="engine.grammar_cache"):
        llm.generate("x", SamplingParams(grammar=Grammar(kind="regex", value="a{300000}")))


# The cache.


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> Iterator[Grammars]:
    found = Grammars(ToyCompiler(None, VOCABULARY), VOCABULARY, 0.0, cache=160)
    monkeypatch.setattr(grammars_module, "_SMALLEST", 1)
    monkeypatch.setattr(grammars_module, "_GROWTH", 1)
    yield found
    found.close()


def keep(cached: Grammars, *entries: CompiledGrammar | Exception) -> list[str]:
    """Put these into the cache, oldest first. Return those that it keeps."""
    for i, entry in enumerate(entries):
        future: Future[CompiledGrammar] = Future()
        if isinstance(entry, Exception):
            future.set_exception(entry)
        else:
            future.set_result(entry)
        cached._compiled[Grammar(kind="regex", value=str(i))] = future
    cached._trim()
    return [str(grammar.value) for grammar in cached._compiled]


def entry(size: int = 1, **fields: Any) -> CompiledGrammar:
    mask_W: Any = None
    return CompiledGrammar(ToyMatcher(3, 9), mask_W, size, **fields)


def test_the_cache_is_bounded_by_bytes(cached: Grammars) -> None:
    assert keep(cached, *(entry(10) for _ in range(20))) == [str(i) for i in range(4, 20)]


def test_the_cache_keeps_nothing_that_was_refused_failed_or_grew(cached: Grammars) -> None:
    assert keep(cached, RequestError("no"), entry(failed=True), entry(worked=20.0), entry()) == ["3"]
