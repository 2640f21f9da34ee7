"""/metrics agrees with what clients observe."""

from __future__ import annotations

import time

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families


def scrape(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = dict(sample.labels)
        if labels.pop("model_name", "") == "tiny" and labels.pop("replica", "0") == "0":
            found[sample.name.removeprefix("dovetail_"), tuple(sorted(labels.items()))] = sample.value
    return found


def test_metrics_count_what_the_clients_saw(server, client):
    before = scrape(server.url)
    ask = dict(model="tiny", prompt="def fib(n):\n", max_tokens=24)
    answer = client.completions.create(**ask, extra_body={"ignore_eos": True})
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    httpx.get(f"{server.url}/ready")
    deadline = time.monotonic() + 60
    while True:  # The engine reports its counters a few times per second.
        after = scrape(server.url)
        gained = {key: value - before.get(key, 0.0) for key, value in after.items()}
        if gained["generation_tokens_total", ()] >= 24 or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert gained["generation_tokens_total", ()] == answer.usage.completion_tokens == 24
    assert gained["prompt_tokens_total", ()] == answer.usage.prompt_tokens
    assert gained["request_generation_tokens_sum", ()] == 24
    assert gained["requests_finished_total", (("outcome", "length"),)] == 1
    assert gained["request_errors_total", (("status", "404"),)] == 1
    assert gained["time_to_first_token_seconds_count", ()] == 1
    first, total = (gained[f"{name}_seconds_sum", ()] for name in ("time_to_first_token", "e2e_request_latency"))
    assert 0 < first < total < 30
    assert 1 <= gained["inter_token_latency_seconds_count", ()] <= 23
    assert after["num_requests_running", ()] == after["num_requests_waiting", ()] == 0


def test_metrics_come_in_openmetrics_too(server):
    answer = httpx.get(f"{server.url}/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
