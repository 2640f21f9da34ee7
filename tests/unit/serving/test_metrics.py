"""Metrics, logs and traces: what is reported is what comes out."""

from __future__ import annotations

import io
import json
import logging
import time
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from dovetail.core import logs
from dovetail.core.errors import ConfigError
from dovetail.core.metrics import COUNTED, Metrics
from dovetail.core.testing.observer import EMPTY
from dovetail.core.traces import Traces
from dovetail.plugins.observer.config import PrometheusConfig
from dovetail.plugins.observer.prometheus import Prometheus


def counters(**changes: float) -> SimpleNamespace:
    return SimpleNamespace(**{**dict.fromkeys((*COUNTED, "running", "waiting", "kv_usage"), 0), **changes})


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"dovetail:{name}", {"model_name": "tiny", **labels})


def test_gauges_are_of_the_moment_and_counters_survive_a_new_engine() -> None:
    metrics = Metrics("tiny")
    metrics.engine(counters(running=3, waiting=7, kv_usage=0.5, output_tokens=100, accepted=20))
    metrics.engine(counters(running=2, output_tokens=130, accepted=20))
    metrics.engine(counters(output_tokens=5, accepted=1))
    found = metrics.registry
    assert [value(found, f"num_requests_{state}") for state in ("running", "waiting")] == [0, 0]
    assert value(found, "generation_tokens_total") == 135
    assert value(found, "spec_decode_num_accepted_tokens_total") == 21
    metrics.engine(counters(running=1, kv_usage=0.25, output_tokens=5, accepted=1))
    assert (value(found, "num_requests_running"), value(found, "kv_cache_usage_ratio")) == (1, 0.25)
    assert value(found, "generation_tokens_total") == 135


def test_a_request_is_in_every_histogram_once() -> None:
    metrics = Metrics("tiny")
    metrics.first_token(0.1)
    metrics.more_tokens(0.4, 4)
    metrics.more_tokens(0.1, 0)
    metrics.request(seconds=0.5, decode_seconds=0.4, prompt_tokens=7, output_tokens=5)
    metrics.request(seconds=0.1, decode_seconds=0.0, prompt_tokens=1, output_tokens=1)
    metrics.sample_ended("stop")
    metrics.error(429)
    metrics.engine_restarted()
    found = metrics.registry
    assert value(found, "time_to_first_token_seconds_sum") == 0.1
    assert value(found, "inter_token_latency_seconds_count") == 1
    assert value(found, "inter_token_latency_seconds_sum") == pytest.approx(0.1)
    assert value(found, "time_per_output_token_seconds_count") == 1
    assert value(found, "time_per_output_token_seconds_sum") == pytest.approx(0.1)
    assert value(found, "e2e_request_latency_seconds_sum") == pytest.approx(0.6)
    assert value(found, "request_prompt_tokens_sum") == 8
    assert value(found, "request_generation_tokens_sum") == 6
    assert value(found, "request_success_total", finished_reason="stop") == 1
    assert value(found, "request_errors_total", status="429") == 1
    assert value(found, "engine_restarts_total") == 1


def test_the_page_is_what_prometheus_reads() -> None:
    page, content_type = Metrics("tiny").render()
    families = {family.name: family for family in text_string_to_metric_families(page.decode())}
    ours = [family for name, family in families.items() if name.startswith("dovetail:")]
    assert content_type.startswith("text/plain") and len(ours) > 20
    assert all(family.documentation.endswith(".") for family in ours)
    assert Metrics("tiny").render("application/openmetrics-text")[1].startswith("application/openmetrics-text")


def test_two_servers_of_one_process_share_nothing() -> None:
    one, other = Metrics("tiny"), Metrics("tiny")
    one.error(500)
    assert value(other.registry, "request_errors_total", status="500") is None


def test_steps_are_read_over_http() -> None:
    observer = Prometheus(PrometheusConfig(port=0))
    observer.step(replace(EMPTY, rows=3, tokens=20, sampled=3, running=3, kv_used=0.5, device_seconds=0.01))
    observer.step(EMPTY)
    with urllib.request.urlopen(f"http://127.0.0.1:{observer.port}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    observer.close()
    samples = {s.name: s.value for f in text_string_to_metric_families(page) for s in f.samples if not s.labels}
    assert samples["dovetail:step_tokens_sum"] == 20
    assert samples["dovetail:step_rows_count"] == 2
    assert samples["dovetail:step_device_seconds_count"] == 1, "a time that nobody knows was counted"
    assert samples["dovetail:step_running"] == 0


def test_a_port_in_use_is_told_at_once() -> None:
    first = Prometheus(PrometheusConfig(port=0))
    with pytest.raises(ConfigError, match=f"observer.prometheus.port={first.port}"):
        Prometheus(PrometheusConfig(port=first.port))
    first.close()


def test_a_log_line_is_one_json_object() -> None:
    stream, root = io.StringIO(), logging.getLogger()
    before = (root.handlers[:], root.level)
    try:
        root.handlers.clear()
        logs.set_up("json", stream=stream)
        logging.getLogger("dovetail.x").info("two\nlines %d", 7, extra={"status": 200})
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("dovetail.x").exception("no")
    finally:
        root.handlers[:], root.level = before
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "two\nlines 7" and first["status"] == 200
    assert (first["level"], first["logger"], first["time"][-6:]) == ("info", "dovetail.x", "+00:00")
    assert "ValueError: broken" in second["exception"]


def test_a_request_is_a_span_in_the_trace_of_its_caller() -> None:
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs the otel extra"
    )
    exporter = memory.InMemorySpanExporter()
    traces = Traces("tiny", exporter=exporter)
    now = time.perf_counter()
    caller = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    traces.request(
        "chat",
        arrival=now - 3,
        scheduled=now - 2.5,
        first_token=now - 2,
        finished=now,
        attributes={"gen_ai.usage.output_tokens": 5},
        headers={"traceparent": caller},
    )
    traces.request("chat", arrival=now - 1, finished=now, error="the engine died")
    traces._provider.force_flush()
    good, bad = exporter.get_finished_spans()
    traces.close()
    assert f"{good.context.trace_id:032x}" in caller
    assert [event.name for event in good.events] == ["queued", "prefill", "decode"]
    assert good.end_time - good.start_time == pytest.approx(3e9, rel=1e-6)
    assert abs(good.end_time - time.time_ns()) < 60e9
    assert good.attributes["gen_ai.usage.output_tokens"] == 5
    assert good.attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(1)
    assert not bad.status.is_ok and [event.name for event in bad.events] == ["queued"]
