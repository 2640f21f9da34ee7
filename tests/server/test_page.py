"""The page at / in a real browser. DOVETAIL_SCREENSHOT=docs/img/server.png writes the screenshot of the docs."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import httpx
import pytest

_spec = importlib.util.spec_from_file_location("chromium", Path(__file__).with_name("chromium.py"))
assert _spec is not None and _spec.loader is not None
chromium = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(chromium)

PROMPT = "class Stack:\n    def push(self, item):\n"

PARTS = "Object.fromEntries([...document.querySelectorAll('#parts tr')].map(r => [...r.cells].map(c => c.textContent)))"
FIGURES = """Object.fromEntries(
    [...document.querySelectorAll('.chart')].map(c => [c.dataset.field, c.querySelector('b').textContent]))"""


def ask(text: str, tokens: int) -> str:
    return f"""document.getElementById('temperature').value = 0;
        document.getElementById('max_tokens').value = {tokens};
        document.getElementById('text').value = {text!r};
        document.getElementById('ask').requestSubmit()"""


def test_the_page_loads_nothing_from_elsewhere(server):
    answer = httpx.get(server.url)
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    for name in ("page.js", "page.css"):
        assert f"/static/{name}" in answer.text
        found = httpx.get(f"{server.url}/static/{name}")
        # The SVG namespace is a URL that is never fetched.
        assert found.status_code == 200 and "http" not in found.text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.skipif(chromium.FOUND is None, reason="no Chromium on this machine")
def test_chat_charts_and_composition(server, tmp_path):
    with chromium.Page(server.url, tmp_path) as page:
        page.wait("document.querySelectorAll('#parts tr').length > 5")
        parts = page.run(PARTS)
        assert parts["scheduler"] == "fcfs" and parts["kv_cache"] == "prefix_hash"
        assert "tiny on cpu" in page.run("document.getElementById('model').textContent")

        # Text is shown before the answer is complete.
        page.run(ask(PROMPT, 160))
        page.wait("document.querySelector('.assistant').textContent && !document.getElementById('stop').hidden")
        page.wait("document.getElementById('speed').textContent.startsWith('160 tokens')")
        expected = server.client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": PROMPT}], temperature=0, max_tokens=160
        )
        assert page.run("document.querySelector('.assistant').textContent") == expected.choices[0].message.content

        page.wait(f"({FIGURES}).ttft_median.endsWith('ms') && ({FIGURES}).kv_usage.endsWith('%')")
        page.wait("document.querySelector('.chart polyline').getAttribute('points').split(' ').length > 5")
        assert page.run("document.getElementById('fleet').hidden"), "one replica is no fleet"
        two = "[0, 1].map(i => ({state: 'ready', running: i, waiting: 2, kv_usage: i / 4, phase: '', failure: ''}))"
        rows = "[...document.querySelectorAll('#replicas tr')].map(r => [...r.cells].map(c => c.textContent))"
        shown = page.run(f"(showReplicas({two}), {rows})")
        assert shown == [["0", "ready", "0", "2", "0.0 %"], ["1", "ready", "1", "2", "25.0 %"]]
        if file := os.environ.get("DOVETAIL_SCREENSHOT"):
            Path(file).write_bytes(page.screenshot())

        page.run(ask("x", 10**12))
        assert "max_completion_tokens" in page.wait("document.querySelector('.wrong.said')?.textContent")
        # The console shows only the refused request.
        assert [problem for problem in page.problems if "400 (Bad Request)" not in problem] == []
