"""One OpenTelemetry span per request, with standard attribute names. Requires: pip install 'dovetail[otel]'."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dovetail.core.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


_SEND_SECONDS = 3.0
"""Timeout for sending spans, retries included. Shutdown waits at most this long, once."""


class Traces:
    """Exports spans in batches from a background thread. Spans contain no text of prompts or outputs."""

    def __init__(self, endpoint: str | None = None, exporter: SpanExporter | None = None) -> None:
        """`endpoint`: OTLP collector over HTTP, such as http://localhost:4318/v1/traces; None = OpenTelemetry's
        environment variables. `exporter` replaces it."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(f"traces need OpenTelemetry ({error}): pip install 'dovetail[otel]'") from None
        self._provider = TracerProvider(resource=Resource.create({"service.name": "dovetail"}))
        exporter = exporter or OTLPSpanExporter(endpoint=endpoint, timeout=_SEND_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("dovetail")
        self._propagator = TraceContextTextMapPropagator()
        # Times come from perf_counter; spans need wall-clock time.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    def request(
        self,
        name: str,
        *,
        arrival: float,
        finished: float,
        scheduled: float | None = None,
        first_token: float | None = None,
        attributes: Mapping[str, str | int | float] | None = None,
        error: str | None = None,
        traceparent: str = "",
    ) -> None:
        """Record a finished request. Times are from time.perf_counter; None = the stage was not reached. `traceparent`:
        W3C header with the parent trace."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        span = self._tracer.start_span(
            name,
            context=self._propagator.extract({"traceparent": traceparent} if traceparent else {}),
            kind=SpanKind.SERVER,
            start_time=self._ns(arrival),
            attributes={"gen_ai.system": "dovetail", **(attributes or {})},
        )
        span.add_event("queued", timestamp=self._ns(arrival))
        if scheduled is not None:
            span.add_event("prefill", timestamp=self._ns(scheduled))
            span.set_attribute("gen_ai.latency.time_in_queue", scheduled - arrival)
        if first_token is not None:
            span.add_event("decode", timestamp=self._ns(first_token))
            span.set_attribute("gen_ai.latency.time_to_first_token", first_token - arrival)
        span.set_attribute("gen_ai.latency.e2e", finished - arrival)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self._ns(finished))

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()

    def _ns(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._epoch_ns
