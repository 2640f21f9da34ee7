"""The server behind its endpoints: what may enter, what it asks of the engine, and when it ends."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from starlette.requests import Request

from dovetail.core.chat_template import ChatTemplate
from dovetail.core.errors import ConfigError, RequestError
from dovetail.core.interfaces import Pooling, SamplingParams
from dovetail.core.serving.client import Stream
from dovetail.core.serving.fleet import Fleet, Reports
from dovetail.core.tokenizer import Tokenizer
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.errors import FieldError, ServerError
from dovetail.plugins.app.serve.monitor import Monitor, RequestRecord, Tracer
from dovetail.plugins.app.serve.reading import Parsers
from dovetail.plugins.app.serve.schemas import Common, Message, Penalised, Prompts, Queued
from dovetail.plugins.app.serve.structured import grammar_of
from dovetail.plugins.app.serve.transport import KEY

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

_THREADS = 4
_INLINE_CHARACTERS = 256
"""Shorter prompts are tokenized faster than a thread would be woken."""
_DENSE = 8
"""Characters a token: few texts have more."""
_CUT = 64
"""Tokens by which the beginning of a text may exceed what it has in the whole text."""
_MASK63 = 2**63 - 1
_TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text")
_PROMPT_FIELD = {"completions": "prompt", "chat": "messages", "responses": "input", "embeddings": "input"}
"""Where each endpoint's requests have what the model reads."""


class Job:
    """One prompt on its way through the engine."""

    def __init__(
        self, service: Service, stream: Stream, endpoint: str, prompt_tokens: int, traceparent: str = ""
    ) -> None:
        self._service, self.stream, self.endpoint = service, stream, endpoint
        self.prompt_tokens, self._traceparent = prompt_tokens, traceparent
        self.output_tokens = 0
        """Written by whoever takes from the stream."""
        self.outcome = ""
        self.timer: asyncio.TimerHandle | None = None
        self._closed = False

    def close(self) -> None:
        """The answer is out, or nobody wants it any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.timer is not None:
            self.timer.cancel()
        self._service.client.abort(self.stream)
        timing = self.stream.timing
        now = time.perf_counter()
        self._service.finished(
            RequestRecord(
                endpoint=self.endpoint,
                outcome=self.outcome or "abort",
                prompt_tokens=self.prompt_tokens,
                cached_tokens=self.stream.cached,
                output_tokens=self.output_tokens,
                arrival=timing.arrival,
                ttft=timing.ttft if timing.first_token else 0.0,
                duration=(timing.finished or now) - timing.arrival,
                traceparent=self._traceparent,
            )
        )


class Service:
    """One server's state. Belongs to the event loop."""

    def __init__(self, config: ServeConfig, composition: Composition) -> None:
        self.config, self.composition = config, composition
        self.parsers = Parsers(config, composition)
        self.monitor = Monitor()
        self._tracer: Tracer | None = None
        if config.traces is not None:
            self._tracer = Tracer(config.traces, lambda: self.model_names[0])
            self.monitor.listeners.append(self._tracer)
        restarts = config.max_restarts if config.on_engine_failure == "restart" else 0
        reports = Reports(self.monitor.stats, self.monitor.more, self.monitor.restarted)
        timeout = math.inf if config.engine_timeout is None else config.engine_timeout
        self.client = Fleet(composition, max_restarts=restarts, timeout=timeout, reports=reports)
        self.started = int(time.time())
        self.draining = False
        """Written by the server when it is told to stop."""
        self.was_ready = False
        """The engine has been ready once. Written by the server."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="dovetail-text")
        self._template: ChatTemplate | None = None
        self._template_known = False
        self._ends: deque[float] = deque(maxlen=64)
        if config.adapter_root is not None and composition.part("adapter").name == "none":
            raise ConfigError(
                f"serve.adapter_root={config.adapter_root}: adapter=none loads nothing; adapter=lora does"
            )
        if config.chat_template is not None and not Path(config.chat_template).expanduser().is_file():
            raise ConfigError(f"serve.chat_template={config.chat_template}: no such file")

    @property
    def ready(self) -> bool:
        return self.client.state == "ready" and not self.draining

    def close(self) -> None:
        if self._tracer is not None:
            self._tracer.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # Names.

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.config.model_names or (self.client.info.model,)

    def model(self, asked: str | None) -> str:
        """The name that the answer states."""
        names = self.model_names
        if asked is None:
            return names[0]
        if asked not in names and asked not in self.client.adapters:
            raise FieldError(
                f"the model {asked!r} does not exist; there is {', '.join((*names, *self.client.adapters))}",
                "model",
                status=404,
                code="model_not_found",
            )
        return asked

    def adapter(self, asked: str | None) -> str:
        """Of the model that a request names; "" = the base model."""
        return "" if asked is None or asked in self.model_names else asked

    # Text.

    @property
    def tokenizer(self) -> Tokenizer:
        return self.client.tokenizer

    async def encode(self, text: str, *, special: bool = True, param: str = "prompt") -> list[int]:
        tokenizer, limit = self.tokenizer, self.client.info.max_len
        if len(text) > _DENSE * limit:
            # It hardly fits, and its beginning tells so at a fraction of the cost.
            if len(await self.threaded(tokenizer.encode, text[: _DENSE * limit], special=special)) > limit + _CUT:
                raise _too_long(f"more than {limit}", limit, param)
        if len(text) <= _INLINE_CHARACTERS:
            ids = tokenizer.encode(text, special=special)
        else:
            ids = await self.threaded(tokenizer.encode, text, special=special)
        if not ids:
            raise FieldError(f"{param}: empty, and this model has no token that begins a text", param)
        return ids

    async def threaded(self, function: Any, *arguments: Any, **named: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(*arguments, **named))

    async def render(self, messages: Sequence[Message], variables: Mapping[str, Any] = MappingProxyType({})) -> str:
        """Through the model's chat template."""
        return await self.threaded(self._render, [plain(message) for message in messages], variables)

    def _render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        if not self._template_known:
            folder, file = self.client.info.folder, self.config.chat_template
            if folder is not None or file is not None:
                path = None if file is None else Path(file).expanduser()
                self._template = ChatTemplate.load(Path(folder or "."), path)
            self._template_known = True
        if self._template is None:
            raise RequestError(
                f"the model {self.client.info.model} has no chat template: use /v1/completions, or start the server "
                "with serve.chat_template=FILE"
            )
        return self._template.render(messages, **variables)

    @property
    def template(self) -> str:
        """Source of the chat template, once something was rendered."""
        return "" if self._template is None else self._template.source

    async def prompts(self, given: Prompts, param: str) -> list[Sequence[int]]:
        """One or many, each as token ids."""
        one = isinstance(given, str) or isinstance(given[0], int)
        many: list[Any] = [given] if one else list(given)
        if len(many) > self.config.max_prompts:
            raise FieldError(f"{param}: {len(many)} prompts, of at most {self.config.max_prompts}", param)
        return [await self.encode(text, param=param) if isinstance(text, str) else text for text in many]

    # Requests.

    def params(self, body: Common, **chosen: Any) -> SamplingParams:
        """What the body asks for; None means the default. `chosen`: what the endpoint works out itself."""
        given: dict[str, Any] = {
            name: value
            for name in ("temperature", "top_p", "min_p", "repetition_penalty", "min_tokens", "extra")
            if (value := getattr(body, name)) is not None
        }
        if body.top_k is not None:
            given["top_k"] = max(body.top_k, 0)
        given |= {
            to: value
            for name, to in (
                ("stop_token_ids", "stop_token_ids"),
                ("ignore_eos", "ignore_eos"),
                ("include_stop_str_in_output", "include_stop"),
            )
            if (value := getattr(body, name)) is not None
        }
        if isinstance(body, Penalised):
            for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
                if (value := getattr(body, name)) is not None:
                    given[name] = value
            if body.stop:
                given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
            if body.seed is not None:
                given["seed"] = body.seed & _MASK63
        if (grammar := grammar_of(body)) is not None:
            given["grammar"] = grammar
            if chosen.get("grammar") is not None:
                raise FieldError("tool_choice: a forced call has a form of its own; give no other", "tool_choice")
        given |= {name: value for name, value in chosen.items() if value is not None}
        if "max_tokens" not in given:
            given["max_tokens"] = None
        try:
            return SamplingParams(**given)
        except ValidationError as error:
            first = error.errors()[0]
            field = str(first["loc"][0]) if first["loc"] else None
            raise FieldError(f"{field + ': ' if field else ''}{first['msg']}", field) from None

    def submit(
        self,
        request: Request,
        body: Queued,
        endpoint: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        keep: Collection[str] = (),
        pooling: Pooling | None = None,
    ) -> list[Job]:
        """Queue every prompt, or none. keep: special tokens whose text is part of the output. pooling: embed them."""
        self._admit(len(prompts) * params.n)
        limit = self.client.info.max_len
        for ids in prompts:
            if len(ids) >= limit:
                raise _too_long(str(len(ids)), limit, _PROMPT_FIELD[endpoint])
        seconds = min((s for s in (self.config.timeout, body.timeout) if s is not None), default=None)
        jobs: list[Job] = []
        try:
            for ids in prompts:
                stream = self.client.submit(
                    ids,
                    params,
                    priority=body.priority or 0,
                    deadline=seconds,
                    user=body.user or "",
                    cache_salt=self._salt(request, body),
                    hints=body.hints,
                    keep=keep,
                    pooling=pooling,
                    adapter=self.adapter(body.model),
                )
                job = Job(self, stream, endpoint, len(ids), request.headers.get("traceparent", ""))
                jobs.append(job)
                if seconds is not None:
                    job.timer = asyncio.get_running_loop().call_later(seconds, self._expire, job, seconds)
        except BaseException:
            for job in jobs:
                job.close()
            raise
        return jobs

    def _salt(self, request: Request, body: Queued) -> str:
        salt = body.cache_salt if body.cache_salt is not None else body.prompt_cache_key or ""
        key = request.scope.get(KEY)
        return f"{key}\x00{salt}" if key and self.config.cache_isolation == "key" else salt

    def _admit(self, samples: int) -> None:
        if self.draining:
            raise ServerError(503, "the server is about to stop", code="shutting_down", retry_after=1)
        capacity = self.client.max_seqs + self.config.max_waiting
        if samples > capacity:
            raise FieldError(
                f"{samples} samples in one request, and the server takes {capacity} "
                "(engine.max_seqs of each replica + serve.max_waiting)",
                "n",
            )
        if self.client.samples + samples > capacity:
            raise ServerError(
                429,
                f"{self.client.samples} samples run or wait, of at most {capacity}: try again later",
                code="queue_full",
                retry_after=self._retry_after(),
            )

    def _retry_after(self) -> int:
        """Seconds until a place is free, at the pace at which requests ended lately."""
        if len(self._ends) < 2:
            return 1
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return max(1, min(60, round(pace * self.config.max_waiting / 2)))

    def _expire(self, job: Job, seconds: float) -> None:
        self.client.abort(job.stream)
        job.stream.fail(ServerError(504, f"the request was not complete after {seconds:g} s", code="timeout"))

    def finished(self, record: RequestRecord) -> None:
        self._ends.append(time.perf_counter())
        self.monitor.request(record)


def _too_long(tokens: str, limit: int, param: str) -> FieldError:
    return FieldError(
        f"the prompt has {tokens} tokens and the context is {limit} (engine.max_len): shorten it",
        param,
        code="context_length_exceeded",
    )


def plain(message: Message) -> dict[str, Any]:
    """As chat templates expect a message: its content is text."""
    found = message.model_dump(exclude_none=True)
    role = "system" if message.role == "developer" else message.role
    for call in found.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return {**found, "role": role, "content": text_of(message.content)}


def _arguments(text: str) -> Any:
    """Templates write arguments as JSON themselves. What is none, as a model may have written it, stays text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def text_of(content: Any, param: str = "messages") -> str:
    """Of content whose parts are all text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in _TEXT_PARTS or part.text is None:
            raise FieldError(f"a content part of type {part.type!r}: this server reads text alone", param)
    return "\n".join(part.text for part in content)
