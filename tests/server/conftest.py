"""Servers with the bundled model: one for the session, and new ones for tests that break theirs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

ROOT = Path(__file__).parents[2]
_START_SECONDS = 90.0
# Renders its variables; its last line makes `auto` choose the reasoning parser.
TEMPLATE = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif -%}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
{%- endfor %}<assistant>{# </think> #}"""


def children(pid: int, of: str = "") -> list[int]:
    """Return child processes; `of`: only those whose command line contains it."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for task in tasks for child in task.read_text().split()]
    return [child for child in found if not of or of.encode() in Path(f"/proc/{child}/cmdline").read_bytes()]


def ended(pid: int) -> bool:
    """Whether a process has ended; a zombie counts as ended."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Server:
    def __init__(self, *overrides: str, **environment: str) -> None:
        words = ("app=serve", "+preset=tiny_cpu", "serve.port=0", "serve.debug=true", *overrides)
        self.process = subprocess.Popen(
            [sys.executable, "run.py", *words],
            cwd=ROOT,
            env=os.environ | environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.wait_log(r"listening on (http://\S+);")[1]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    def wait_log(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            for line in list(self.log):
                if found := re.search(pattern, line):
                    return found
            assert self.process.poll() is None and time.monotonic() < deadline, "".join(self.log)
            time.sleep(0.02)

    def wait_ready(self) -> Server:
        deadline = time.monotonic() + _START_SECONDS
        while httpx.get(f"{self.url}/ready").status_code != 200:
            assert time.monotonic() < deadline, "".join(self.log)
            time.sleep(0.05)
        return self

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def stats(self) -> dict[str, float]:
        """Run the allocator's integrity check and return its counters."""
        answer = httpx.post(f"{self.url}/debug/check")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def engine_pid(self) -> int:
        return children(self.process.pid, "engine_main:main")[0]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(90)
        self._reader.join(5)
        assert not any("did not end" in line for line in self.log), "".join(self.log)
        return status


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    started = Server("serve.max_waiting=256", "serve.max_body_bytes=1000000").wait_ready()
    yield started
    assert started.stop() == 0, "".join(started.log)


@pytest.fixture(scope="session")
def conversing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server with a chat template for tools and reasoning."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    started = Server(f"serve.chat_template={template}").wait_ready()
    yield started
    assert started.stop() == 0, "".join(started.log)


def wrote(text: str) -> dict[str, str]:
    """Return an extra_body with which the model writes exactly this text."""
    return {"regex": re.escape(text).replace("\\ ", " ")}


def _starting() -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def begin(*overrides: str, **environment: str) -> Server:
        started.append(Server(*overrides, **environment))
        return started[-1]

    yield begin
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


start = pytest.fixture(_starting)
start_module = pytest.fixture(_starting, scope="module")


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()
