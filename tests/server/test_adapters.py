"""Adapters over HTTP: selected as models, loaded and unloaded while requests run, kept across engine restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dovetail.plugins.app.serve.meta import _inside

pytestmark = pytest.mark.nightly

GREEDY = {"prompt": "def fib(n):\n", "max_tokens": 12, "temperature": 0}


@pytest.fixture
def adapted(save_lora: Callable[..., str], tmp_path: Path, start: Callable[..., Any]) -> Any:
    """A server with adapters in tmp_path, one of them loaded at start-up."""
    folder = save_lora("first", seed=1)
    for name, seed in (("second", 2), ("third", 3)):
        save_lora(name, seed=seed)
    words = ["adapter=lora", "adapter.slots=1", f"+adapter.load.first='{folder}'", f"serve.adapter_root='{tmp_path}'"]
    return start(*words, "serve.model_names=[base]").wait_ready()


def post(server, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)


def text(server, model: str | None, **more: object) -> str:
    answer = post(server, "completions", **GREEDY, **({"model": model} if model else {}), **more)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == (model or "base")
    return answer.json()["choices"][0]["text"]


def error(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def test_adapters_over_http(adapted, tmp_path: Path, save_lora: Callable[..., str]) -> None:
    listed = httpx.get(f"{adapted.url}/v1/models").json()["data"]
    assert [(m["id"], m["parent"]) for m in listed] == [("base", None), ("first", "base")]
    assert httpx.get(f"{adapted.url}/v1/models/first").json()["root"] == "first"

    # Load another adapter while requests run.
    with ThreadPoolExecutor(8) as pool:
        busy = [pool.submit(text, adapted, name) for name in ("base", "first") * 4]
        loaded = post(adapted, "load_lora_adapter", lora_name="second", lora_path="second")
        assert loaded.status_code == 200, loaded.text
        running = {name: {future.result() for future in busy[i::2]} for i, name in enumerate(("base", "first"))}
        assert all(len(texts) == 1 for texts in running.values())
        names = ["base", "first", "second"] * 4
        together = list(pool.map(lambda name: text(adapted, name), names))
    texts = {name: text(adapted, name) for name in names}
    assert together == [texts[name] for name in names] and len(set(texts.values())) == 3
    assert running == {name: {texts[name]} for name in running} and text(adapted, None) == texts["base"]

    # All generating endpoints.
    client = openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="none")
    chunks = client.completions.create(model="second", stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == texts["second"]
    said = {
        name: client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "x = "}], max_tokens=12, temperature=0
        )
        for name in texts
    }
    assert len({answer.choices[0].message.content for answer in said.values()}) == 3
    answers = {name: client.responses.create(model=name, input="x = ", max_output_tokens=16) for name in texts}
    assert {name: answer.model for name, answer in answers.items()} == {name: name for name in texts}
    assert post(adapted, "../tokenize", model="second", prompt="x").status_code == 200
    with pytest.raises(
        openai.NotFoundError, match="'nobody' does not exist; available: base, first, second"
    ) as refused:
        client.completions.create(model="nobody", **GREEDY)
    assert refused.value.code == "model_not_found"

    # Refused requests have no effect.
    outside = tmp_path.parent / "outside"
    outside.mkdir(exist_ok=True)
    (tmp_path / "link").symlink_to(outside)
    for path in ("..", str(outside), "link", "second/../../outside"):
        assert "is not in serve.adapter_root" in error(
            post(adapted, "load_lora_adapter", lora_name="x", lora_path=path), 400
        )
    (tmp_path / "linked").mkdir()
    for file in (tmp_path / "third").iterdir():
        (tmp_path / "linked" / file.name).symlink_to(file)
    _inside(tmp_path, "linked")  # as in a download cache
    (tmp_path / "linked" / "adapter_model.safetensors").unlink()
    (outside / "weights").write_bytes(b"")
    (tmp_path / "linked" / "adapter_model.safetensors").symlink_to(outside / "weights")
    said = error(post(adapted, "load_lora_adapter", lora_name="x", lora_path="linked"), 400)
    assert said == "lora_path: adapter_model.safetensors in 'linked' leads out of serve.adapter_root"
    assert "is not a valid path" in error(post(adapted, "load_lora_adapter", lora_name="x", lora_path="a\0"), 400)
    save_lora("wide", seed=1, rank=32)
    assert "rank 32" in error(post(adapted, "load_lora_adapter", lora_name="x", lora_path="wide"), 400)
    said = error(post(adapted, "load_lora_adapter", lora_name="x", lora_path="nothing"), 400)
    assert "adapter_config.json" in said and str(tmp_path) not in said
    said = error(post(adapted, "load_lora_adapter", lora_name="x", lora_path="a" * 300), 400)
    assert "name too long" in said and str(tmp_path) not in said
    assert "is loaded" in error(post(adapted, "load_lora_adapter", lora_name="first", lora_path="second"), 400)
    assert "base model" in error(post(adapted, "load_lora_adapter", lora_name="base", lora_path="second"), 400)
    assert "no name" in error(post(adapted, "load_lora_adapter", lora_name="a\nb", lora_path="third"), 400)
    assert "'x' is not loaded" in error(post(adapted, "unload_lora_adapter", lora_name="x"), 404)
    assert text(adapted, "second") == texts["second"]

    # Unload an adapter, and load another under its name.
    assert post(adapted, "unload_lora_adapter", lora_name="first").status_code == 200
    assert "'first' does not exist" in error(post(adapted, "completions", model="first", **GREEDY), 404)
    assert post(adapted, "load_lora_adapter", lora_name="third", lora_path=str(tmp_path / "third")).status_code == 200
    assert post(adapted, "unload_lora_adapter", lora_name="second").status_code == 200
    assert post(adapted, "load_lora_adapter", lora_name="second", lora_path="first").status_code == 200
    assert text(adapted, "second") == texts["first"]
    third = text(adapted, "third")

    # A restarted engine has the same adapters.
    os.kill(adapted.engine_pid(), signal.SIGKILL)
    adapted.wait_log("it is started again")
    adapted.wait_ready()
    listed = httpx.get(f"{adapted.url}/v1/models").json()["data"]
    assert [m["id"] for m in listed] == ["base", "third", "second"]
    assert text(adapted, "second") == texts["first"] and text(adapted, "third") == third
    assert httpx.post(f"{adapted.url}/debug/check").status_code == 200


def test_adapters_can_be_loaded_only_if_the_operator_allows_it(server) -> None:
    for path in ("load_lora_adapter", "unload_lora_adapter"):
        assert post(server, path, lora_name="x", lora_path="y").status_code == 404
