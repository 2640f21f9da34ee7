"""/v1/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from dovetail.core.frontend.outputs import Delta
from dovetail.core.interfaces import TokenLogprobs
from dovetail.plugins.app.serve import output
from dovetail.plugins.app.serve.errors import FieldError
from dovetail.plugins.app.serve.schemas import CompletionRequest
from dovetail.plugins.app.serve.service import Job, Service
from dovetail.plugins.app.serve.transport import STREAMS

_DEFAULT_TOKENS = 16
"""Default of max_tokens in OpenAI's API."""


def install(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=STREAMS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _Completion(service, body, request).answer()


class _Completion(output.Generation[CompletionRequest]):
    def __init__(self, service: Service, body: CompletionRequest, request: Request) -> None:
        super().__init__(service, body, request, "cmpl")
        self.n = body.n or 1
        self.samples = max(self.n, body.best_of or 0)
        self.prompt_only = body.max_tokens == 0
        if body.suffix:
            raise FieldError("suffix: this server does not support fill-in-the-middle", "suffix")
        if body.best_of is not None and body.best_of < self.n:
            raise FieldError(f"best_of={body.best_of} is less than n={self.n}", "best_of")
        if body.stream and self.samples > self.n:
            raise FieldError("best_of: cannot be combined with stream", "best_of")
        if self.prompt_only and not body.echo:
            raise FieldError("max_tokens=0 needs echo=true", "max_tokens")

    @property
    def head(self) -> dict[str, Any]:
        return {"object": "text_completion", **super().head}

    async def answer(self) -> Response:
        body, service = self.body, self.service
        async with self.limit:
            self.prompts = await service.text.prompts(body.prompt, "prompt")
        self.texts = await service.text.threaded(self._texts) if body.echo else []
        wants_logprobs = body.logprobs if body.logprobs is not None else (0 if self.samples > self.n else None)
        max_tokens = _DEFAULT_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
        params = service.params(
            body,
            n=self.samples,
            max_tokens=max_tokens,
            logprobs=wants_logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        jobs = service.submit(self.request, body, "completions", self.prompts, params, self.limit)
        return await self.reply(jobs, self.samples)

    def _texts(self) -> list[str]:
        """Return the text of each prompt."""
        given, decode = self.body.prompt, self.service.text.tokenizer.decode
        if isinstance(given, str):
            return [given]
        if isinstance(given[0], str):
            return list(given)
        return [decode(ids) for ids in self.prompts]

    def whole(self, jobs: list[Job], outputs: list[Delta]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for at in range(len(jobs)):
            drawn = outputs[at * self.samples : (at + 1) * self.samples]
            # The engine reports the prompt's logprobs once, with the first sample.
            drawn = [delta._replace(prompt_logprobs=drawn[0].prompt_logprobs) for delta in drawn]
            if self.samples > self.n:
                drawn = sorted(drawn, key=output.mean_logprob, reverse=True)[: self.n]
            for delta in drawn:
                choices.append(self._choice(len(choices), at, delta, self._logprobs()))
        return {**self.head, "choices": choices, "usage": output.usage(jobs)}

    def _logprobs(self) -> output.CompletionLogprobs | None:
        return None if self.body.logprobs is None else output.CompletionLogprobs(self.service.text.tokenizer)

    def _choice(
        self, index: int, at: int, delta: Delta, logprobs: output.CompletionLogprobs | None, *, first: bool = True
    ) -> dict[str, Any]:
        text = "" if self.prompt_only else delta.text
        if self.body.echo and first:
            text = self.texts[at] + text
        found = None
        if logprobs is not None:
            if self.body.echo and first:
                ids = self.prompts[at]
                logprobs.add(ids, [None, *delta.prompt_logprobs[: len(ids) - 1]], self.texts[at])
            if not self.prompt_only:
                logprobs.add(delta.token_ids, delta.logprobs)
            found = logprobs.take()
        choice = {"index": index, "text": text, "logprobs": found, "finish_reason": delta.finish_reason}
        if self.body.return_token_ids:
            choice["token_ids"] = [] if self.prompt_only else list(delta.token_ids)
        return choice

    async def chunks(self, jobs: list[Job]) -> AsyncIterator[bytes]:
        chunks = output.Chunks(self.head, jobs, self.body.stream_options)
        begun: dict[int, output.CompletionLogprobs | None] = {}
        # Prefill chunks deliver prompt logprobs piecewise, to the first sample only: hold them until a token arrives.
        waiting: dict[int, list[Delta]] = {}
        prompts: dict[int, list[TokenLogprobs]] = defaultdict(list)
        """Prompt -> its logprobs, for its later samples."""
        async for items in output.choice_deltas(jobs, self.n):
            piece = b""
            for index, delta in items:
                prompts[index // self.n] += delta.prompt_logprobs
            for index, delta in items:
                if not delta.token_ids and delta.finish_reason is None:
                    waiting.setdefault(index, []).append(delta)
                    continue
                if held := waiting.pop(index, None):
                    delta = output.join([*held, delta])
                first = index not in begun
                if first:
                    begun[index] = self._logprobs()
                    delta = delta._replace(prompt_logprobs=prompts[index // self.n])
                choice = self._choice(index, index // self.n, delta, begun[index], first=first)
                piece += chunks.event(choice)
            if piece:
                yield piece
        yield chunks.end()
