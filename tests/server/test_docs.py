"""The scripts of docs/serving.md against a server with the settings that they need."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


def test_scripts_of_the_page(start):
    server = start("serve.pooling=last", "serve.tool_parser=hermes").wait_ready()
    scripts = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.S)
    outputs = {}
    for name, script in scripts:
        assert "http://127.0.0.1:8000/v1" in script
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(script.replace("http://127.0.0.1:8000", server.url), {})
        outputs[name] = out.getvalue()
    assert outputs.pop("embed.py").split()[0] == "2"
    assert "get_weather" in outputs.pop("call_tools.py")
    assert outputs.keys() == {"ask.py"} and outputs["ask.py"]
    assert server.stats()["pages_owned"] == 0
