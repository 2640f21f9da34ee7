"""vLLM's OpenAI server, for compare.py. Runs under a Python that has vLLM and not Dovetail.

Settings: those of compare.py's `Shared`, "engine_args" (arguments of vllm.LLM, which override all others), and "port".
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from vllm_peer import engine_args


def command(settings: dict[str, Any]) -> list[str]:
    """Spell the engine's arguments as command-line options: `--max-model-len 1024`, `--no-enable-prefix-caching`."""
    args = engine_args(settings) | {"skip_tokenizer_init": None, "host": "127.0.0.1", "port": settings["port"]}
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in args.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            if value or not name.startswith("disable_"):  # no opposite exists
                words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return words


if __name__ == "__main__":
    words = command(json.loads(sys.argv[1]))
    os.execv(words[0], words)
