"""Metrics and traces: reported values appear in the output."""

from __future__ import annotations

import time
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from dovetail.core.errors import ConfigError
from dovetail.core.metrics import COUNTED, SHORT, Metrics
from dovetail.core.testing.observer import EMPTY
from dovetail.core.traces import Traces
from dovetail.plugins.observer.config import PrometheusConfig
from dovetail.plugins.observer.prometheus import Prometheus


def counters(**changes: float) -> SimpleNamespace:
    return SimpleNamespace(**{**dict.fromkeys((*COUNTED, "running", "waiting", "kv_usage"), 0), **changes})


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """Return a metric of the model; for an engine metric, that of `replica`, by default the first."""
    labels = {"model_name": "tiny", **labels}
    found = registry.get_sample_value(f"dovetail_{name}", labels)
    return registry.get_sample_value(f"dovetail_{name}", {"replica": "0"} | labels) if found is None else found


def test_gauges_are_of_the_moment_and_counters_survive_a_new_engine() -> None:
    metrics = Metrics("tiny")
    metrics.stats(0, counters(running=3, waiting=7, kv_usage=0.5, output_tokens=100, accepted=20))
    metrics.stats(0, counters(running=2, output_tokens=130, accepted=20))
    metrics.stats(0, counters(output_tokens=5, accepted=1))
    found = metrics.registry
    assert [value(found, f"num_requests_{state}") for state in ("running", "waiting")] == [0, 0]
    assert value(found, "generation_tokens_total") == 135
    assert value(found, "spec_decode_num_accepted_tokens_total") == 21
    metrics.stats(0, counters(running=1, kv_usage=0.25, output_tokens=5, accepted=1))
    assert (value(found, "num_requests_running"), value(found, "kv_cache_usage_ratio")) == (1, 0.25)
    assert value(found, "generation_tokens_total") == 135


def test_replicas_are_counted_apart() -> None:
    metrics = Metrics("tiny", replicas=2)
    assert value(metrics.registry, "num_requests_waiting", replica="1") == 0
    metrics.stats(0, counters(running=3, output_tokens=100))
    metrics.stats(1, counters(running=4, output_tokens=10))
    metrics.stats(1, counters(running=5, output_tokens=30))
    metrics.engine_restarted(1)
    by_replica = [
        [value(metrics.registry, name, replica=replica) for replica in ("0", "1")]
        for name in ("num_requests_running", "generation_tokens_total", "engine_restarts_total")
    ]
    assert by_replica == [[3, 5], [100, 30], [0, 1]]


def record(**changes: object) -> SimpleNamespace:
    given = {"outcome": "stop", "prompt_tokens": 7, "output_tokens": 5, "ttft": 0.1, "duration": 0.5, "tpot": 0.1}
    return SimpleNamespace(**{**given, **changes})


def test_a_request_is_in_every_histogram_once() -> None:
    metrics = Metrics("tiny")
    metrics.request(record())
    metrics.request(record(output_tokens=1, duration=0.1, tpot=0.0))
    metrics.request(record(outcome="abort", output_tokens=0, ttft=0.0, duration=0.3, tpot=0.0))
    metrics.more_tokens([0.1])
    metrics.error(429)
    metrics.engine_restarted(0)
    found = metrics.registry
    assert value(found, "time_to_first_token_seconds_count") == 2
    assert value(found, "inter_token_latency_seconds_sum") == pytest.approx(0.1)
    assert value(found, "time_per_output_token_seconds_count") == 1
    assert value(found, "e2e_request_latency_seconds_sum") == pytest.approx(0.6)
    assert value(found, "request_prompt_tokens_sum") == 14
    assert value(found, "request_generation_tokens_sum") == 6
    assert value(found, "requests_finished_total", outcome="stop") == 2
    assert value(found, "requests_finished_total", outcome="abort") == 1
    assert value(found, "request_errors_total", status="429") == 1
    assert value(found, "engine_restarts_total") == 1


def test_times_between_tokens_are_in_their_buckets() -> None:
    """Equal to a histogram of prometheus_client."""
    metrics, values = Metrics("tiny"), [0.0005, 0.001, 0.0011, 0.3, 99.0]
    own = Histogram("own", "For comparison.", ("model_name",), buckets=SHORT, registry=None)
    for seconds in values:
        metrics.more_tokens([seconds])
        own.labels("tiny").observe(seconds)
    metrics.more_tokens(values)
    for seconds in values:
        own.labels("tiny").observe(seconds)
    ours = next(f for f in metrics.registry.collect() if f.name == "dovetail_inter_token_latency_seconds")
    found, wanted = (
        {(s.name.removeprefix(family.name), s.labels.get("le")): s.value for s in family.samples}
        for family in (ours, *own.collect())
    )
    wanted.pop(("_created", None))
    assert found == wanted and found["_bucket", "0.001"] == 4
    assert all(sample.labels["model_name"] == "tiny" for sample in ours.samples)


def test_every_metric_has_a_description() -> None:
    ours = [family for family in Metrics("tiny").registry.collect() if family.name.startswith("dovetail_")]
    assert len(ours) > 20
    assert all(family.documentation.endswith(".") for family in ours)


def test_two_servers_of_one_process_share_nothing() -> None:
    one, other = Metrics("tiny"), Metrics("tiny")
    one.error(500)
    assert value(other.registry, "request_errors_total", status="500") is None


def test_steps_are_read_over_http() -> None:
    observer = Prometheus(PrometheusConfig(port=0))
    observer.step(replace(EMPTY, rows=3, tokens=20, sampled=3, running=3, kv_used=0.5, device_seconds=0.01))
    observer.step(replace(EMPTY, expert_load=30.5, mean_expert_load=20.0))
    observer.step(EMPTY)
    with urllib.request.urlopen(f"http://127.0.0.1:{observer.port}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    observer.close()
    samples = {s.name: s.value for f in text_string_to_metric_families(page) for s in f.samples if not s.labels}
    assert samples["dovetail_step_tokens_sum"] == 20
    assert samples["dovetail_step_rows_count"] == 3
    assert samples["dovetail_step_device_seconds_count"] == 1, "an unknown time was counted"
    assert samples["dovetail_step_running"] == 0
    loads = samples["dovetail_step_expert_load"], samples["dovetail_step_mean_expert_load"]
    assert loads == (30.5, 20.0), "a record without loads keeps the last ones"


def test_a_port_in_use_is_reported_at_once() -> None:
    first = Prometheus(PrometheusConfig(port=0))
    with pytest.raises(ConfigError, match=f"observer.prometheus.port={first.port}"):
        Prometheus(PrometheusConfig(port=first.port))
    first.close()


def test_a_request_is_a_span_in_the_trace_of_its_caller() -> None:
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs the otel extra"
    )
    exporter = memory.InMemorySpanExporter()
    traces = Traces(exporter=exporter)
    now = time.perf_counter()
    caller = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    traces.request(
        "chat",
        arrival=now - 3,
        scheduled=now - 2.5,
        first_token=now - 2,
        finished=now,
        attributes={"gen_ai.usage.output_tokens": 5},
        traceparent=caller,
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
