"""Calls into a process with limits, which chat templates use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.core.chat_template import TRIAL, ChatTemplate, Renderer
from dovetail.core.checkpoint import FolderCheckpoint
from dovetail.core.errors import ConfigError, RequestError

LOOP = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}" + "{% endfor %}" * 2
)
PLAIN = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
ORPHAN = """
import sys
from dovetail.core.chat_template import ChatTemplate, Renderer
renderer = Renderer(600.0)
renderer.process.start()
print(renderer.process.pid, flush=True)
renderer.render(ChatTemplate(sys.argv[1], {}), [])
"""


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer(30.0)
    yield renderer
    renderer.process.close()


def ended(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 'a' * 3000000000 }}", "needs more than 1024 MiB of memory"),
        ("{{ 1 / 0 }}", "raised ZeroDivisionError: division by zero"),
        ("{{ (2.0 ** 9999) }}", "raised OverflowError"),
        ("{{ '\\ud800' }}", "raised UnicodeEncodeError"),
        ("{{ ('a' * 70000000) }}", "makes a prompt of 70000000 characters"),
        ("{% if %}", r"cannot be parsed: .* \(line 1\)"),
        ("{{ raise_exception('no system role') }}", "refuses these messages: no system role"),
        ("{{ raise_exception('x' * 9999) }}", r"refuses these messages: x{400,500} \.\.\.$"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "raised RecursionError"),
    ],
)
def test_a_template_that_fails_refuses_one_request(renderer: Renderer, source: str, reason: str) -> None:
    with pytest.raises(RequestError, match=f"the model's chat template {reason}"):
        renderer.render(ChatTemplate(source, {}), TRIAL)
    before = renderer.process.pid
    assert renderer.render(PLAIN, TRIAL, tools=None) == "<s>Hello" and renderer.process.pid == before


def test_a_template_that_loops_is_killed_and_the_next_call_starts_anew() -> None:
    renderer = Renderer(0.2)
    renderer.process.start()
    before = renderer.process.pid
    assert before is not None
    with pytest.raises(RequestError, match=r"the model's chat template took more than 0\.2 s"):
        renderer.render(ChatTemplate(LOOP, {}), TRIAL)
    assert ended(before) and renderer.process.pid is None
    assert renderer.render(PLAIN, TRIAL) == "<s>Hello"
    crashed = renderer.process.pid
    assert crashed is not None
    os.kill(crashed, signal.SIGKILL)
    with pytest.raises(RequestError, match="its process was killed by SIGKILL"):
        renderer.render(PLAIN, TRIAL)
    assert renderer.render(PLAIN, TRIAL) == "<s>Hello"
    renderer.process.close()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_the_process_ends_with_its_parent_even_in_a_loop() -> None:
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN, LOOP], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not ended(child)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while not ended(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"\xff\xfe"),
        ("tokenizer_config.json", b'{"chat_template": '),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", b'{"chat_template": 3}'),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        ChatTemplate.load(FolderCheckpoint(tmp_path))
