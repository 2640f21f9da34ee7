"""Texts of requests: no request delays those of others for long, and mistakes of the model's files are reported."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.core.errors import ConfigError, EngineDown, RequestError
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.errors import ServerError
from dovetail.plugins.app.serve.schemas import Message
from dovetail.plugins.app.serve.service import TimeLimit
from dovetail.plugins.app.serve.text import Texts

HELLO = [Message(role="user", content="Hello")]


class Letters:
    """Tokenizer with one token for every `ratio` characters. Texts of one letter "z" wait for `released`."""

    def __init__(self, ratio: int) -> None:
        self.ratio, self.lengths = ratio, []
        self.released, self.begun = threading.Event(), threading.Semaphore(0)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        if text[0] == "z":
            self.begun.release()
            self.released.wait(60)
        if text.startswith("aaaa") and len(text) == 384:
            raise RequestError("this model's tokenizer fails on the text: retry-limit")
        self.lengths.append(len(text))
        return [0] * (len(text) // self.ratio)


def texts(tokenizer: Any = None, folder: Path | None = None, max_len: int = 1000, **config: Any) -> Texts:
    async def wait_ready() -> None:
        return None

    if folder is not None:
        (folder / "config.json").write_text("{}")
    info = SimpleNamespace(max_len=max_len, checkpoint=None if folder is None else str(folder), model="m")
    client = SimpleNamespace(info=info, tokenizer=tokenizer, wait_ready=wait_ready)
    return Texts(ServeConfig(**config), client)  # type: ignore[arg-type]


@pytest.mark.parametrize("ratio", [1, 8, 64, 500])
def test_a_text_that_cannot_fit_is_refused_by_its_beginning(ratio: int) -> None:
    tokenizer = Letters(ratio)
    subject = texts(tokenizer)
    with pytest.raises(RequestError, match="more than 1000 tokens"):
        asyncio.run(subject.encode("a" * 8_000_000))
    assert sum(tokenizer.lengths) < 5 * 1000 * max(8, ratio)
    assert len(asyncio.run(subject.encode("a" * (900 * ratio)))) == 900
    subject.close()


def test_a_short_text_does_not_wait_for_long_ones() -> None:
    tokenizer = Letters(64)
    subject = texts(tokenizer, max_len=1_000_000)

    async def run() -> int:
        long = [asyncio.ensure_future(subject.encode("z" * 1_000_000)) for _ in range(8)]
        await asyncio.to_thread(tokenizer.begun.acquire)
        found = len(await subject.encode("a" * 10_000))
        tokenizer.released.set()
        await asyncio.gather(*long)
        return found

    assert asyncio.run(run()) == 10_000 // 64
    subject.close()


def test_a_time_limit_includes_the_text() -> None:
    tokenizer = Letters(64)
    subject = texts(tokenizer)

    async def run() -> None:
        limit = TimeLimit(0.05)
        with pytest.raises(ServerError, match=r"not complete after 0\.05 s") as caught:
            async with limit:
                await subject.encode("z" * 300)
        assert caught.value.status == 504
        with pytest.raises(ServerError, match="not complete"):
            async with limit:  # Nothing is left of it.
                await asyncio.sleep(60)
        async with TimeLimit(None):
            pass

    asyncio.run(run())
    tokenizer.released.set()
    subject.close()


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_folder_without_a_tokenizer_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_folder: bool
) -> None:
    """Each text prompt will be refused. Random weights have no tokenizer by nature."""

    class Client(SimpleNamespace):
        @property
        def tokenizer(self) -> Any:
            raise RequestError("the model m has no tokenizer.json in its checkpoint")

    subject = texts(None, tmp_path if has_folder else None)
    client: Any = subject.client
    subject.client = Client(info=client.info, wait_ready=client.wait_ready)  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        asyncio.run(subject.prepare())
    subject.close()
    assert ["no tokenizer.json" in record.getMessage() for record in caplog.records] == [True] * has_folder


@pytest.mark.parametrize(
    ("name", "content", "reported", "refusal"),
    [
        ("chat_template.jinja", b"{% if %}", "chat template: fails", "chat template cannot be parsed"),
        ("chat_template.jinja", b"{{ 1 / 0 }}", "ZeroDivisionError", "ZeroDivisionError"),
        (
            "tokenizer_config.json",
            b"{",
            "cannot be read as JSON",
            "cannot be used: tokenizer_config.json: cannot be read",
        ),
    ],
)
def test_what_fails_in_a_trial_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: bytes, reported: str, refusal: str
) -> None:
    (tmp_path / name).write_bytes(content)
    subject = texts(Letters(1), tmp_path)

    async def run() -> None:
        with caplog.at_level(logging.WARNING):
            await subject.prepare()
        with pytest.raises(RequestError, match=refusal) as caught:
            await subject.render(HELLO)
        assert str(tmp_path) not in str(caught.value)

    asyncio.run(run())
    subject.close()
    tokenizer, template = [record.getMessage() for record in caplog.records]
    assert tokenizer.startswith("tokenizer: fails in a trial") and "retry-limit" in tokenizer
    assert reported in template


def test_chats_behind_a_template_that_loops_are_refused_in_time(tmp_path: Path) -> None:
    loop = "".join("{% for " + name + " in range(99999) %}" for name in "abc") + "{% endfor %}" * 3
    (tmp_path / "chat_template.jinja").write_text(loop)
    subject = texts(Letters(1), tmp_path, template_timeout=0.1)

    async def run() -> list[Any]:
        return await asyncio.gather(*(subject.render(HELLO) for _ in range(6)), return_exceptions=True)

    refusals = asyncio.run(run())
    subject.close()
    statuses = [refusal.status for refusal in refusals]
    assert "took more than 0.1 s" in str(refusals[0]) and statuses[0] == 400
    assert statuses == sorted(statuses) and statuses[-1] == 503 and refusals[-1].retry_after == 1


def test_an_engine_that_does_not_start_needs_no_trial() -> None:
    subject = texts()

    async def fails() -> None:
        raise EngineDown("no engine")

    subject.client.wait_ready = fails  # type: ignore[method-assign,assignment]
    asyncio.run(subject.prepare())
    subject.close()


def test_a_template_file_is_read_at_once(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_bytes(b"\xff")
    for file in ("chat.jinja", "missing.jinja"):
        with pytest.raises(ConfigError, match=file):
            texts(chat_template=str(tmp_path / file))
