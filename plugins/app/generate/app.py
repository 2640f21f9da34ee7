"""`app=generate`: complete prompts, on the terminal or into a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from statistics import median
from typing import TYPE_CHECKING

import yaml
from pydantic import ValidationError

from dovetail.core.compose import Host
from dovetail.core.compose.wording import show
from dovetail.core.engine.adapters import unknown_adapter
from dovetail.core.errors import ConfigError, RequestError, shown
from dovetail.core.interfaces import App, SamplingParams
from dovetail.core.startup_notes import SIMULATED
from dovetail.plugins.app.generate.config import GenerateConfig
from dovetail.plugins.app.generate.prompts import gather
from dovetail.plugins.app.generate.results import ResultFile
from dovetail.plugins.app.waiting import bar, line_console, long_phases, phases

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from dovetail.core.compose import Composition
    from dovetail.core.frontend.llm import LLM
    from dovetail.core.frontend.outputs import Generation

    Add = Callable[[int, Generation | RequestError], None]
    """Takes the index of a prompt and its result."""

MADE_WITH = ("model", "quant", "adapter", "logits", "grammar")
"""Nodes on which the text of an output depends, besides the options of the app and engine.seed; also spec_decode, where
its drafts change the text."""


def _check_tokenizer(composition: Composition) -> None:
    """Refuse a model without a tokenizer before it is loaded: prompts are text."""
    from dovetail.core.tokenizer import FILE

    model = composition.part("model")
    checkpoint = model.target().source(model.config).checkpoint
    if checkpoint is None or checkpoint.text(FILE) is None:
        cause = (
            "it has no checkpoint; set model.path=<folder or file>"
            if checkpoint is None
            else f"{shown(checkpoint.where(FILE))} is missing; add the file"
        )
        raise ConfigError(
            f"app=generate completes texts, and the model has no tokenizer: {cause}, or give token ids to app=serve "
            "or dovetail.LLM"
        )


class GenerateApp(App):
    config: GenerateConfig

    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        """Return 0, or 1 if some of several prompts could not be completed."""
        # Reads the model's folder without importing torch, so that a missing one is reported at once.
        composition.part("model").capabilities(Host())
        texts = gather(prompts, self.config.prompts)
        params = self._params()
        _check_tokenizer(composition)
        if self.config.adapter and composition.part("adapter").name == "none":
            raise unknown_adapter(self.config.adapter, (), served=False)
        self._console = line_console()
        if self.config.output is not None:
            return self._into_file(composition, texts, params, self.config.output)
        if self.config.resume is not None:
            raise ConfigError("generate.resume has no effect without generate.output")
        with self._start(composition) as llm:
            began = time.perf_counter()
            if len(texts) == 1 and params.n == 1:
                ttft, failed = [self._stream(llm, texts[0], params)], 0
            else:
                ttft, failed = self._complete(llm, texts, range(len(texts)), params, _InOrder(texts).add)
            self._summary(llm, time.perf_counter() - began, ttft)
        return self._exit_code(failed, len(texts))

    def _into_file(self, composition: Composition, texts: Sequence[str], params: SamplingParams, output: str) -> int:
        settings, resume = _settings(composition), self.config.resume
        with ResultFile(output, texts, settings, source=self.config.prompts, resume=resume) as file:
            left = [index for index in range(len(texts)) if index not in file.done]
            if len(left) < len(texts):
                self._print(f"{len(texts) - len(left)} of {len(texts)} results are in {file.partial}", style="dim")
            failed = 0
            try:
                if left:
                    with self._start(composition) as llm:
                        failed = self._write(llm, texts, left, params, file)
                file.finish()
            except BaseException:
                if file.done:
                    there = f"{len(file.done)} of {len(texts)} results are in {file.partial}"
                    self._print(f"{there}; generate.resume=true continues")
                raise
        return self._exit_code(failed, len(left))

    def _write(
        self, llm: LLM, texts: Sequence[str], left: Sequence[int], params: SamplingParams, file: ResultFile
    ) -> int:
        """Complete the prompts at `left` and write their records. Returns the number of failed prompts."""
        began = time.perf_counter()
        simulated = any(SIMULATED in note for note in llm.info.notes)
        mark = {"note": f"{SIMULATED}: the text has no meaning"} if simulated else {}
        try:
            ttft, failed = self._complete(
                llm, texts, left, params, lambda index, result: file.write(index, _record(texts[index], result) | mark)
            )
        except RequestError:
            file.discard()  # an output that has only errors must not replace a former one
            raise
        self._summary(llm, time.perf_counter() - began, ttft)
        return failed

    def _exit_code(self, failed: int, prompts: int) -> int:
        if failed:
            self._print(f"{failed} of {prompts} prompts failed; the result of each is its error")
        return 1 if failed else 0

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False)

    def _params(self) -> SamplingParams:
        options = self.config.model_dump(exclude={"prompts", "output", "resume", "adapter"})
        try:
            return SamplingParams(**options)
        except ValidationError as error:
            raise ConfigError("; ".join(map(_mistake, error.errors()))) from None

    def _start(self, composition: Composition) -> LLM:
        from dovetail.core.frontend.llm import LLM

        with phases(self._console) as progress:
            llm = LLM(composition=composition, progress=progress)
        info = llm.info
        self._print(f"{info.device}, started in {llm.start_seconds:.1f} s{long_phases(info.phases)}", style="dim")
        for note in info.notes:
            self._print(f"note: {note}", style="dim")
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

    def _complete(
        self, llm: LLM, texts: Sequence[str], left: Sequence[int], params: SamplingParams, add: Add
    ) -> tuple[list[float], int]:
        """Pass the result of each prompt at `left` to `add` as it completes. Returns (times to first token, number of
        failed prompts). Raises the last RequestError if all of `texts` failed."""
        ttft: list[float] = []
        failed = 0
        # On one terminal, a bar would be drawn between lines of output.
        shows_results = self.config.output is None and sys.stdout.isatty()
        shown = nullcontext() if shows_results else bar(self._console, "generate", len(left), redirect_stdout=False)
        results = llm.generate_each([texts[index] for index in left], params, adapter=self.config.adapter)
        with shown as update, closing(results):
            for at, result in results:
                add(left[at], result)
                if isinstance(result, RequestError):
                    failed += 1
                    if failed == len(texts):
                        raise result
                else:
                    ttft.append(result.timing.ttft)
                if update is not None:
                    update(advance=1)
        return ttft, failed

    def _summary(self, llm: LLM, seconds: float, ttft: Sequence[float]) -> None:
        counters = llm.counters
        parts = [
            f"{counters.output_tokens} tokens in {seconds:.2f} s",
            f"{counters.output_tokens / seconds:.1f} tokens/s",
        ]
        if ttft:
            parts.append(f"TTFT {median(ttft) * 1e3:.0f} ms" + (" (median)" if len(ttft) > 1 else ""))
        if counters.drafted:
            share = counters.accepted / counters.drafted
            length = 1 + counters.accepted / counters.decode_rows
            kind = "SIMULATED: " if llm.composition.build("spec_decode").simulated_rates else ""
            parts.append(f"{kind}accepted {share:.0%} of drafts, {length:.2f} tokens a step")
        if counters.cached_tokens:
            parts.append(f"prefix cache {counters.cached_tokens / counters.entered_tokens:.0%}")
        self._print(" | ".join(parts), style="bold")


def _settings(composition: Composition) -> dict[str, object]:
    """Return what the output depends on, as option -> value."""
    nodes = yaml.safe_load(composition.to_yaml())
    for name in ("prompts", "output", "resume"):
        del nodes["generate"][name]
    drafter = composition.build("spec_decode")
    lossless = drafter.verify == "draws" and not drafter.simulated_rates
    made_with = MADE_WITH if lossless else (*MADE_WITH, "spec_decode")
    chosen = {f"{kind}.{k}": value for kind in ("generate", *made_with) for k, value in nodes.get(kind, {}).items()}
    return {**chosen, "engine.seed": nodes["engine"]["seed"]}


def _mistake(fault: ErrorDetails) -> str:
    """Return what pydantic found in a sampling parameter, in terms of the option that has it."""
    place, reason = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
    if not place:
        return f"generate.{reason}"  # one of our own checks, whose words begin with the parameter
    return f"generate.{place}={show(fault['input'])}: {reason.removeprefix('Input ')}"


def _record(prompt: str, result: Generation | RequestError) -> dict[str, object]:
    if isinstance(result, RequestError):
        return {"prompt": prompt, "error": str(result)}
    return {
        "prompt": prompt,
        "completions": [
            {"text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason} for c in result.completions
        ],
        "ttft_s": round(result.timing.ttft, 6),
        "cached_tokens": result.cached_tokens,
    }


class _InOrder:
    """Prints results in the order of the prompts, each as soon as those before it are printed."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._prompts = prompts
        self._waiting: dict[int, Generation | RequestError] = {}
        self._next = 0

    def add(self, index: int, result: Generation | RequestError) -> None:
        self._waiting[index] = result
        while self._next in self._waiting:
            _show(self._prompts[self._next], self._waiting.pop(self._next))
            self._next += 1


def _show(prompt: str, result: Generation | RequestError) -> None:
    if isinstance(result, RequestError):
        print(f"=== {prompt!r}\nerror: {result}\n", flush=True)
        return
    for i, completion in enumerate(result.completions):
        mark = f" [{i}]" if len(result.completions) > 1 else ""
        print(f"=== {prompt!r}{mark}\n{prompt}{completion.text}\n", flush=True)
