"""Selection of the first failure, and the component to which an error belongs."""

from __future__ import annotations

import json
import socket
import sys
from types import ModuleType
from typing import Any

import pytest

from dovetail import LLM, Component, Config, SamplingParams, compose
from dovetail.core.compose import Package, Registered, Registry, cli, installed
from dovetail.core.errors import DovetailError, EngineStopped, PluginError, for_clients
from dovetail.core.parallel.channel import Channel
from dovetail.core.parallel.failure import RankFailure, describe_exit, first_cause, for_user
from dovetail.core.parallel.process import report

WORDS = ["engine.device=cpu", "engine.max_len=128", "engine.kv_pages=64", "logits=[penalties]", "spec_decode=ngram"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, presence_penalty=1.0, ignore_eos=True)
ACME = """
from dovetail.plugins.scheduler.fcfs import FCFSScheduler

def choose(sequences):
    return {}["boom"]

class Scheduler(FCFSScheduler):
    def schedule(self, ctx):
        return [choose(one) for one in [1]]
"""


def failure(rank: int, at: float, *, silent: bool) -> RankFailure:
    return RankFailure(rank, at, "failed", silent)


def test_of_those_that_left_a_message_the_earliest() -> None:
    assert first_cause([failure(2, 7.0, silent=False), failure(1, 6.5, silent=False)]).rank == 1


def test_a_silent_death_comes_before_its_neighbours_complaints() -> None:
    assert first_cause([failure(1, 6.5, silent=False), failure(2, 6.6, silent=True)]).rank == 2


def test_exits_in_words() -> None:
    assert describe_exit(3, "serving") == "ended with exit status 3 and no message while serving"
    assert describe_exit(-11, "serving") == "was killed by SIGSEGV while serving"
    assert "memory" in describe_exit(-9, "serving")


def fail(self: Any, *arguments: Any, **options: Any) -> Any:
    raise KeyError("boom")


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("scheduler", "schedule"),
        ("scheduler", "add"),
        ("kv_cache", "acquire"),
        ("attention", "plan_device"),
        ("model", "forward"),
        ("logits", "apply"),
        ("spec_decode", "propose"),
    ],
)
def test_a_failed_step_names_the_component_in_one_line(kind: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("tiny", overrides=WORDS) as llm:
        part = next(iter(llm.composition.many(kind).values())) if kind == "logits" else llm.composition.part(kind)
        monkeypatch.setattr(part.target(), method, fail)
        with pytest.raises(EngineStopped) as raised:
            llm.generate("abcabcabcabc", PARAMS)
    said = f"the engine stopped: package {part.package}: {kind}={part.name} failed: KeyError: 'boom'"
    assert str(raised.value) == said
    assert isinstance(raised.value.__cause__, PluginError) and isinstance(raised.value.__cause__.__cause__, KeyError)


def test_a_function_of_a_package_counts_as_its_component(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("acme.parts")
    exec(ACME, vars(package))
    monkeypatch.setitem(sys.modules, "acme.parts", package)
    one = Component(kind="scheduler", name="boom", config=Config, target="acme.parts:Scheduler", api="scheduler/0.3")
    own = installed()
    registry = Registry(
        [*own.registered.values(), Registered(one, Package("acme", "1.0"))], own.problems, own.config_dirs
    )
    with LLM(composition=compose([*WORDS, "scheduler=boom"], "generate", registry=registry)) as llm:
        with pytest.raises(EngineStopped, match="package acme 1.0: scheduler=boom failed: KeyError: 'boom'"):
            llm.generate("x", PARAMS)


def test_a_fault_of_the_core_blames_no_component(monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.core.worker.runner import Runner

    with LLM("tiny", overrides=WORDS) as llm:
        execute = Runner.execute
        monkeypatch.setattr(Runner, "execute", lambda self, plan, blobs: execute(self, None, blobs))  # type: ignore
        with pytest.raises(EngineStopped, match=r"the engine stopped: AttributeError: .* \(in dovetail.core.worker"):
            llm.generate("x", PARAMS)


@pytest.mark.parametrize("debug", ["", "1"])
def test_the_command_line_shows_one_message(
    debug: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOVETAIL_DEBUG", debug)
    monkeypatch.setattr(compose(["app=generate"]).target("scheduler"), "update", fail)
    assert cli.main([*WORDS, "app=generate", "--", "x = 1"]) == 2
    out, err = capsys.readouterr()
    assert out.endswith("\n"), "the message does not continue a line of the output"
    assert "scheduler=fcfs failed: KeyError: 'boom'" in err.splitlines()[-1]
    assert ("Traceback" in err, "DOVETAIL_DEBUG=1 shows" in err) == (bool(debug), not debug)


def test_a_process_reports_one_line_and_the_traceback() -> None:
    ours, theirs = map(Channel, socket.socketpair())
    try:
        fail(None)
    except KeyError as error:
        report(ours, error)
    message, _ = theirs.recv()
    assert (message["type"], message["text"]) == ("DovetailError", "KeyError: 'boom'")
    assert "in fail" in message["traceback"]
    report(ours, DovetailError("two\nlines for the user"))
    message, _ = theirs.recv()
    assert (message["text"], message["traceback"]) == ("two\nlines for the user", "")
    assert RankFailure(1, 0.0, "failed", silent=False, traceback="Trace").error().__cause__ is not None
    assert json.dumps(message)


def test_an_error_for_users_stays_as_it_is() -> None:
    error = DovetailError("no")
    assert for_user(error) is error


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("failed: KeyError: 'boom'\n  File /a.py", "failed: KeyError: 'boom'"),
        ("[Errno 2] No such file: '/data/x/y.json'", "[Errno 2] No such file: '<path>'"),
        ("model.path=/opt/llama: missing (~/a)", "model.path=<path>: missing (<path>)"),
        ("see https://a.b/c and 3/4", "see https://a.b/c and 3/4"),
        ("", ""),
        ("x" * 1000, "x" * 500 + "..."),
    ],
)
def test_clients_get_one_line_without_paths(text: str, shown: str) -> None:
    assert for_clients(text) == shown
