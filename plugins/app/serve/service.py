"""State shared by the endpoints: admission, submission to the engine, and the end of requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from starlette.requests import Request

from dovetail.core.errors import ConfigError
from dovetail.core.frontend.client import Stream
from dovetail.core.frontend.fleet import Fleet
from dovetail.core.interfaces import Pooling, RequestOptions, SamplingParams
from dovetail.core.metrics import RequestRecord
from dovetail.plugins.app.serve import exchange
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.errors import FieldError, ServerError, body_of
from dovetail.plugins.app.serve.monitor import Monitor, Reporter, Tracer
from dovetail.plugins.app.serve.output_parsing import Parsers
from dovetail.plugins.app.serve.predicted_tokens import PredictedTokens
from dovetail.plugins.app.serve.schemas import Common, Penalised, Queued, ResponsesRequest
from dovetail.plugins.app.serve.text import Texts, too_long

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

_MASK63 = 2**63 - 1
_SAMPLING = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias"),
    *("min_tokens", "stop_token_ids", "ignore_eos", "extra"),
)
"""Fields of requests that SamplingParams has too."""
_PROMPT_FIELD = {"completions": "prompt", "chat": "messages", "responses": "input", "embeddings": "input"}
"""Endpoint -> request field that holds the prompt."""


class Job:
    """One prompt that the engine is processing."""

    def __init__(self, service: Service, stream: Stream, endpoint: str, prompt_tokens: int, request: Request) -> None:
        self._service, self.stream, self.endpoint = service, stream, endpoint
        self.prompt_tokens, self._request = prompt_tokens, request
        self.output_tokens = 0
        """Written by the consumer of the stream, as is `outcome`."""
        self.outcome = ""
        self.predicted: PredictedTokens | None = None
        """Counts the tokens of the request's prediction, if it has one. Written by the consumer of the stream."""
        self.timer: asyncio.TimerHandle | None = None
        self._closed = False

    def close(self) -> None:
        """Record the end of the job, and abort it if it is still running. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.timer is not None:
            self.timer.cancel()
        self._service.client.abort(self.stream)
        facts = exchange.of(self._request.scope)
        facts.prompt_tokens += self.prompt_tokens
        facts.cached_tokens += self.stream.cached
        facts.output_tokens += self.output_tokens
        timing = self.stream.timing
        now = time.perf_counter()
        self._service.finished(
            RequestRecord(
                endpoint=self.endpoint,
                outcome="error" if self._failed else self.outcome or "abort",
                prompt_tokens=self.prompt_tokens,
                cached_tokens=self.stream.cached,
                output_tokens=self.output_tokens,
                arrival=timing.arrival,
                ttft=timing.ttft if timing.first_token else 0.0,
                duration=(timing.finished or now) - timing.arrival,
                traceparent=self._request.headers.get("traceparent", ""),
            )
        )

    @property
    def _failed(self) -> bool:
        """Whether the engine or the server is the cause of the end."""
        error = self.stream.error
        return error is not None and (status := body_of(error)[0]) >= 500 and status != 504


class TimeLimit:
    """Time limit of one request, from its arrival. As an async context manager, it limits the work inside."""

    def __init__(self, seconds: float | None) -> None:
        """`seconds`: None = no limit."""
        self._seconds = seconds
        self.deadline = None if seconds is None else time.perf_counter() + seconds
        """A time of time.perf_counter()."""

    async def __aenter__(self) -> None:
        left = None if self.deadline is None else self.deadline - time.perf_counter()
        self._timeout = asyncio.timeout(left)
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError:
            raise self.error() from None

    def error(self) -> ServerError:
        return ServerError(504, f"the request was not complete after {self._seconds:g} s", code="timeout")


class Service:
    """State of a server process. Used only in the event loop."""

    def __init__(
        self, config: ServeConfig, composition: Composition, client: Fleet, monitor: Monitor | Reporter, started: int
    ) -> None:
        """`started`: time.time() at the start of the server."""
        self.config, self.composition = config, composition
        self.client, self.monitor, self.started = client, monitor, started
        self.parsers = Parsers(config, composition)
        self._tracer: Tracer | None = None
        if config.traces is not None:
            self._tracer = Tracer(config.traces, lambda: self.model_names[0])
            self.monitor.listeners.append(self._tracer.request)
        self.draining = False
        """Set by the HTTP server on shutdown: new requests are refused."""
        self.text = Texts(config, self.client)
        self._ends: deque[float] = deque(maxlen=64)
        if config.adapter_root is not None and composition.part("adapter").name == "none":
            raise ConfigError(
                f"serve.adapter_root={config.adapter_root}: adapter=none cannot load adapters; use adapter=lora"
            )

    @property
    def ready(self) -> bool:
        return self.client.state == "ready" and not self.draining

    def close(self) -> None:
        if self._tracer is not None:
            self._tracer.close()
        self.text.close()

    # Names.

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.config.model_names or (self.client.info.model,)

    def model(self, asked: str | None) -> str:
        """Return the model name for the answer. Raises FieldError (404) for an unknown one."""
        names = self.model_names
        if asked is None:
            return names[0]
        if asked not in names and asked not in self.client.adapters:
            raise FieldError(
                f"the model {asked!r} does not exist; available: {', '.join((*names, *self.client.adapters))}",
                "model",
                status=404,
                code="model_not_found",
            )
        return asked

    def adapter(self, asked: str | None) -> str:
        """Return the adapter of the requested model; "" = the base model."""
        return "" if asked is None or asked in self.model_names else asked

    # Requests.

    def params(self, body: Common, **chosen: Any) -> SamplingParams:
        """Build the sampling parameters of a request; None means the default. `chosen`: values set by the endpoint."""
        given = {name: getattr(body, name, None) for name in _SAMPLING}
        given["include_stop"] = body.include_stop_str_in_output
        if body.top_k is not None:
            given["top_k"] = max(body.top_k, 0)
        if isinstance(body, Penalised):
            if body.stop:
                given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
            if body.seed is not None:
                given["seed"] = body.seed & _MASK63
        field, grammar = constraint_of(body)
        if grammar is not None:
            given["grammar"] = grammar
            if chosen.get("grammar") is not None:
                raise FieldError(
                    "tool_choice: a forced call already constrains the output; give no other constraint",
                    "tool_choice",
                )
        stated = {name: value for name, value in (*given.items(), *chosen.items()) if value is not None}
        try:
            return SamplingParams(**{"max_tokens": None, **stated})
        except ValidationError as error:
            first = error.errors()[0]
            place = str(first["loc"][0]) if first["loc"] else None
            # Pydantic puts this before the words of our own checks.
            reason = first["msg"].removeprefix("Value error, ")
            message = f"{place + ': ' if place else ''}{reason}"
            raise FieldError(message, field if place == "grammar" else place) from None

    def submit(
        self,
        request: Request,
        body: Queued,
        endpoint: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        limit: TimeLimit,
        *,
        keep: Collection[str] = (),
        pooling: Pooling | None = None,
        admitted: bool = False,
    ) -> list[Job]:
        """Submit all prompts, or none if one is refused. `keep`: special tokens whose text stays in the output.
        `pooling`: embed the prompts instead of generating. `admitted`: they take the places of earlier prompts of the
        same request, so the queue is not checked."""
        if not admitted:
            self._admit(len(prompts) * params.n)
        max_len = self.client.info.max_len
        for ids in prompts:
            if len(ids) >= max_len:
                raise too_long(str(len(ids)), max_len, _PROMPT_FIELD[endpoint])
        options = RequestOptions(
            priority=body.priority or 0,
            deadline=limit.deadline,
            user=body.user or "",
            cache_salt=self._salt(request, body),
            hints=body.hints or {},
            pooling=pooling,
            adapter=self.adapter(body.model),
        )
        jobs: list[Job] = []
        try:
            for ids in prompts:
                stream = self.client.submit(ids, params, options, keep=keep)
                job = Job(self, stream, endpoint, len(ids), request)
                if params.prediction:
                    job.predicted = PredictedTokens(params.prediction)
                jobs.append(job)
                if limit.deadline is not None:
                    left = limit.deadline - time.perf_counter()
                    job.timer = asyncio.get_running_loop().call_later(left, self._expire, job, limit)
        except BaseException:
            for job in jobs:
                job.close()
            raise
        return jobs

    @property
    def capacity(self) -> int:
        """Maximum number of samples that run or wait."""
        return self.client.max_seqs + self.config.max_waiting

    def _salt(self, request: Request, body: Queued) -> str:
        salt = body.cache_salt if body.cache_salt is not None else body.prompt_cache_key or ""
        key = exchange.of(request.scope).key
        return f"{key}\x00{salt}" if key and self.config.cache_isolation == "key" else salt

    def _admit(self, samples: int) -> None:
        if self.draining:
            raise ServerError(503, "the server is about to stop", code="shutting_down", retry_after=1)
        capacity = self.capacity
        if samples > capacity:
            raise FieldError(
                f"{samples} samples in one request, but the server accepts at most {capacity} "
                "(engine.max_seqs of each replica + serve.max_waiting)",
                "n",
            )
        if self.client.samples + samples > capacity:
            raise ServerError(
                429,
                f"{self.client.samples} samples are running or waiting, of at most {capacity}: try again later",
                code="queue_full",
                retry_after=self._retry_after(),
            )

    def _retry_after(self) -> int:
        """Estimate the seconds until a place is free, from the rate at which recent requests ended."""
        if len(self._ends) < 2:
            return 1
        interval = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        # Each process counts only its own requests.
        return max(1, min(60, round(interval * self.config.max_waiting / 2 / self.config.processes)))

    def limit(self, timeout: float | None = None) -> TimeLimit:
        """Return the time limit of a request that arrives now. `timeout`: field of the request."""
        return TimeLimit(min((s for s in (self.config.timeout, timeout) if s is not None), default=None))

    def _expire(self, job: Job, limit: TimeLimit) -> None:
        self.client.abort(job.stream)
        job.stream.fail(limit.error())

    def finished(self, record: RequestRecord) -> None:
        self._ends.append(time.perf_counter())
        self.monitor.request(record)


def constraint_of(body: Common) -> tuple[str, dict[str, Any] | None]:
    """Return the field of a request that constrains its output, and the constraint as for SamplingParams.grammar; None
    = free text, unless a tool call is forced."""
    found: list[tuple[str, dict[str, Any]]] = []
    if body.regex is not None:
        found.append(("regex", {"kind": "regex", "value": body.regex}))
    if body.choice is not None:
        found.append(("choice", {"kind": "choice", "value": tuple(body.choice)}))
    if body.grammar is not None:
        found.append(("grammar", {"kind": "lark", "value": body.grammar}))
    if isinstance(body, Penalised) and (wanted := body.response_format) is not None:
        schema = wanted.json_schema.schema_ if wanted.json_schema is not None else None
        found += _json("response_format", wanted.type, schema)
    if isinstance(body, ResponsesRequest) and body.text is not None and (form := body.text.format) is not None:
        found += _json("text", form.type, form.schema_)
    if len(found) > 1:
        raise FieldError(f"{' and '.join(name for name, _ in found)}: give only one of them", found[1][0])
    return found[0] if found else ("tools", None)


def _json(param: str, kind: str, schema: dict[str, Any] | None) -> list[tuple[str, dict[str, Any]]]:
    if kind == "text":
        return []
    if kind == "json_object":
        return [(param, {"kind": "json_object"})]
    if schema is None:
        raise FieldError(f"{param}: type json_schema needs a schema", param)
    return [(param, {"kind": "json_schema", "value": schema})]
