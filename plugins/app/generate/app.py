"""`app=generate`: complete prompts, on the terminal or into a file."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console

from dovetail.core.compose import Host
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import App, SamplingParams
from dovetail.plugins.app.generate.config import GenerateConfig
from dovetail.plugins.app.waiting import bar, long_phases, phases

if TYPE_CHECKING:
    from dovetail.core.compose import Composition
    from dovetail.core.frontend.llm import LLM
    from dovetail.core.frontend.outputs import Generation

DEFAULT = "def read_json(path):\n    with open(path) as f:\n"
"""Default prompt; Python, since the bundled model is trained on it."""


class GenerateApp(App):
    config: GenerateConfig

    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        # Reads the model's folder without importing torch, so that a missing one is reported at once.
        composition.part("model").capabilities(Host())
        texts = gather(prompts, self.config.prompts)
        params = self._params()
        self._console = Console(stderr=True, highlight=False)
        with ExitStack() as stack:
            output = None
            if self.config.output is not None:
                try:
                    output = stack.enter_context(Path(self.config.output).open("w", encoding="utf-8"))
                except OSError as error:
                    raise ConfigError(f"generate.output={self.config.output}: cannot be written ({error})") from None
            llm = stack.enter_context(self._start(composition))
            began = time.perf_counter()
            if output is None and len(texts) == 1 and params.n == 1:
                ttft = [self._stream(llm, texts[0], params)]
            else:
                generations = self._complete(llm, texts, params)
                ttft = [g.timing.ttft for g in generations]
                for generation in generations:
                    if output is not None:
                        print(json.dumps(_record(generation), ensure_ascii=False), file=output)
                    else:
                        _show(generation)
            self._summary(llm, time.perf_counter() - began, ttft)
        return 0

    def _params(self) -> SamplingParams:
        options = self.config.model_dump(exclude={"prompts", "output", "adapter"})
        try:
            return SamplingParams(**options)
        except ValueError as error:
            raise ConfigError(f"generate: {error}") from None

    def _start(self, composition: Composition) -> LLM:
        from dovetail.core.frontend.llm import LLM

        with phases(self._console) as progress:
            llm = LLM(composition=composition, progress=progress)
        info = llm.info
        self._console.print(f"[dim]{info.device}, started in {llm.start_seconds:.1f} s{long_phases(info.phases)}[/]")
        for note in info.notes:
            self._console.print(f"[dim]note: {note}[/]")
        return llm

    def _stream(self, llm: LLM, prompt: str, params: SamplingParams) -> float:
        """Print the output as it is generated. Returns the time to first token, seconds."""
        sys.stdout.write(prompt)
        sys.stdout.flush()
        began, ttft = time.perf_counter(), 0.0
        try:
            for delta in llm.stream(prompt, params, adapter=self.config.adapter):
                ttft = ttft or time.perf_counter() - began
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        except BaseException:
            # Start a new line for the error message.
            print(flush=True)
            raise
        print(flush=True)
        return ttft

    def _complete(self, llm: LLM, prompts: Sequence[str], params: SamplingParams) -> list[Generation]:
        with bar(self._console, "generate", len(prompts)) as update:
            return llm.generate(prompts, params, on_done=partial(update, advance=1), adapter=self.config.adapter)

    def _summary(self, llm: LLM, seconds: float, ttft: Sequence[float]) -> None:
        counters = llm.counters
        parts = [
            f"{counters.output_tokens} tokens in {seconds:.2f} s",
            f"{counters.output_tokens / seconds:.1f} tokens/s",
            f"TTFT {median(ttft) * 1e3:.0f} ms" + (" (median)" if len(ttft) > 1 else ""),
        ]
        if counters.drafted:
            share = counters.accepted / counters.drafted
            length = 1 + counters.accepted / counters.decode_rows
            parts.append(f"accepted {share:.0%} of drafts, {length:.2f} tokens a step")
        if counters.cached_tokens:
            parts.append(f"prefix cache {counters.cached_tokens / counters.entered_tokens:.0%}")
        self._console.print(f"[bold]{' | '.join(parts)}[/]")


def _record(generation: Generation) -> dict[str, object]:
    return {
        "prompt": generation.prompt,
        "completions": [
            {"text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason} for c in generation.completions
        ],
        "ttft_s": round(generation.timing.ttft, 6),
        "cached_tokens": generation.cached_tokens,
    }


def _show(generation: Generation) -> None:
    for i, completion in enumerate(generation.completions):
        mark = f" [{i}]" if len(generation.completions) > 1 else ""
        print(f"=== {generation.prompt!r}{mark}\n{generation.prompt}{completion.text}\n")


def gather(words: Sequence[str], source: str | None) -> list[str]:
    """Return the prompts: the arguments after `--`, else the file, else stdin for "-", else the default."""
    if words and source:
        raise ConfigError(f"prompts come after `--` or from generate.prompts={source}, not from both")
    if words:
        prompts = list(words)
    elif source is None:
        prompts = [DEFAULT]
    elif source == "-":
        prompts = [sys.stdin.read()]
    else:
        prompts = _read(Path(source))
    if not prompts or not all(prompts):
        raise ConfigError("a prompt is empty: every prompt needs at least one character")
    return prompts


def _read(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"generate.prompts={file}: cannot be read ({error})") from None
    lines = [line for line in lines if line.strip()]
    return [_from_json(line, file, i) for i, line in enumerate(lines, 1)] if file.suffix == ".jsonl" else lines


def _from_json(line: str, file: Path, number: int) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{file}:{number}: not an object with "prompt" ({type(error).__name__}: {error})') from None
    if not isinstance(prompt, str):
        raise ConfigError(f'{file}:{number}: "prompt" is {type(prompt).__name__}, not text')
    return prompt
