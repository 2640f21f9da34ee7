"""Admission of requests: limits, keys and queue. A bad request does not affect others."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from dovetail.core.errors import ConfigError
from dovetail.plugins.app.serve import keys

ROOT = Path(__file__).parents[2]
JSON = {"content-type": "application/json"}

BAD = {
    "NaN bias": (b'{"prompt": "x", "logit_bias": {"5": NaN}}', 400),
    "infinite temperature": (b'{"prompt": "x", "temperature": 1e999}', 400),
    "invalid UTF-8": (b'{"prompt": "\xff\xfe"}', 400),
    "half a surrogate pair": (b'{"prompt": "\\ud800"}', 400),
    "half a surrogate pair in a hint": (b'{"prompt": "x", "extra": {"\\ud800": 1}}', 400),
    "no JSON": (b"{", 400),
    "deep JSON": (b"[" * 100_000, 400),
    "deep extra": (b'{"prompt": "x", "extra": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}", 400),
    "no object": (b"3", 400),
    "a huge number": (b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}", 400),
    "too long": (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413),
    "too many tokens": (b'{"prompt": "' + b"x " * 400_000 + b'"}', 400),
    "bad schema": (
        b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}',
        400,
    ),
    "bad regex": (b'{"prompt": "x", "regex": "("}', 400),
    "two forms": (b'{"prompt": "x", "regex": "a", "choice": ["a"]}', 400),
    "unknown extra": (b'{"prompt": "x", "extra": {"nobody_reads": 1}}', 400),
}


@pytest.fixture(scope="module")
def victim(server):
    """Run a stream while bad requests arrive."""
    body = {"prompt": "x = 1\n", "max_tokens": 600, "ignore_eos": True, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield
        tokens = sum(line.startswith("data: {") for line in lines) + 1
        assert tokens > 280, "it was cut short"


@pytest.mark.parametrize("what", BAD)
def test_a_bad_request_is_refused_and_does_not_affect_others(server, victim, what):
    body, status = BAD[what]
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=JSON, timeout=60)
    assert answer.status_code == status, answer.text[:300]
    assert answer.json()["error"]["message"]
    assert "xxxx" not in answer.text


def test_a_body_in_chunks_is_counted(server):
    async def endless():
        for _ in range(200):
            yield b"x" * 10_000

    async def send() -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.post(f"{server.url}/v1/completions", content=endless(), headers=JSON)

    assert asyncio.run(send()).status_code == 413


def test_no_prompt_in_the_log(server):
    secret = "hunter2 = 'sesame'"
    httpx.post(f"{server.url}/v1/completions", json={"prompt": secret, "max_tokens": 1})
    httpx.post(f"{server.url}/v1/completions", json={"prompt": [secret, 3], "max_tokens": 1})
    httpx.post(f"{server.url}/v1/chat/completions", json={"messages": [{"role": secret}]})
    assert "hunter2" not in "".join(server.log) and "sesame" not in "".join(server.log)


def test_the_page_of_the_docs_runs(server, tmp_path):
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(# ask\.py\n.*?)```", page, re.S)[1].replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and len(done.stdout) > 20, done.stderr


def test_key_files(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# who\nteam-a:{hashlib.sha256(b'one').hexdigest()}\n{hashlib.sha256(b'two').hexdigest()}\n")
    accepted = keys.load(str(file), {keys.VARIABLE: "three, four"})
    assert accepted.name("one") == "team-a"
    assert all(accepted.name(key) for key in ("two", "three", "four")) and accepted.name("five") is None
    assert not keys.load(None, {})
    for unsendable in ("schlüssel", "two words", "tab\there"):
        with pytest.raises(ConfigError, match="DOVETAIL_API_KEYS: key 2 contains") as error:
            keys.load(None, {keys.VARIABLE: f"fine,{unsendable}"})
        assert unsendable not in str(error.value)
    file.write_text(hashlib.sha256("schlüssel".encode()).hexdigest())
    assert keys.load(str(file), {}).name("schlüssel".encode().decode("latin-1"))
    file.write_text("sk-plain-key\n")
    with pytest.raises(ConfigError, match="line 1") as error:
        keys.load(str(file), {})
    assert "sk-plain" not in str(error.value)
    file.write_text("")
    with pytest.raises(ConfigError, match="no key"):
        keys.load(str(file), {})


def test_keys_queue_deadline_and_origins(start, tmp_path):
    file = tmp_path / "keys.txt"
    made = subprocess.run(
        "printf 'team-a:%s\\n' \"$(printf %s SECRET | sha256sum | cut -d' ' -f1)\"",
        shell=True, capture_output=True, check=True,
    )  # fmt: skip
    file.write_bytes(made.stdout)
    server = start(
        f"serve.api_key_file={file}",
        "serve.max_waiting=2",
        "engine.max_seqs=1",
        "serve.timeout=30",
        "serve.cors_origins=[https://example.org]",
        "serve.log_format=json",
        DOVETAIL_API_KEYS="OTHER",
    ).wait_ready()
    with pytest.raises(openai.AuthenticationError):
        server.client("WRONG").models.list()
    assert httpx.get(f"{server.url}/v1/models").headers["www-authenticate"] == "Bearer"
    client, other = server.client("SECRET"), server.client("OTHER")
    assert [model.id for model in client.models.list()] == ["tiny"]

    # Cached prefixes are shared per key and salt.
    long = "def f(x):\n    return x\n" * 20

    def cached(who: openai.OpenAI, **extra: object) -> int:
        answer = who.completions.create(model="tiny", prompt=long, max_tokens=1, extra_body=extra)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached(client) == 0 and cached(client) > 0
    assert cached(other) == 0 and cached(client, cache_salt="mine") == 0

    # Queue: one runs, two wait, the fourth is refused.
    ask = dict(model="tiny", prompt="x = 1\n", max_tokens=2000, extra_body={"ignore_eos": True}, stream=True)
    with client.completions.create(**ask) as running:
        next(iter(running))
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="tiny", prompt=["a", "b", "c"], max_tokens=1)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        # Deadline while waiting.
        with pytest.raises(openai.APIStatusError) as late:
            client.completions.create(model="tiny", prompt="a", max_tokens=1, extra_body={"timeout": 0.2})
        assert late.value.status_code == 504
    with pytest.raises(openai.BadRequestError, match="serve.max_waiting"):
        client.completions.create(model="tiny", prompt="a", n=4)
    # A deadline during a stream is an event.
    ask["extra_body"] = {"ignore_eos": True, "timeout": 0.5}
    with pytest.raises(openai.APIError, match=r"not complete after 0\.5 s"):
        list(client.completions.create(**ask))

    def allowed(origin: str) -> str | None:
        headers = {"origin": origin, "access-control-request-method": "POST"}
        return httpx.options(f"{server.url}/v1/completions", headers=headers).headers.get("access-control-allow-origin")

    assert allowed("https://example.org") == "https://example.org" and allowed("https://evil.org") is None
    assert server.stop() == 0
    assert all(json.loads(line)["level"] for line in server.log), server.log
