"""Spans reach a collector; a missing collector does not affect requests."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from .conftest import until

pytestmark = pytest.mark.nightly

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")


def test_a_request_reaches_the_collector_whose_end_affects_no_request(start):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            import gzip

            body = self.rfile.read(int(self.headers["content-length"]))
            bodies.append(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    address = f"serve.traces=http://127.0.0.1:{collector.server_port}/v1/traces"
    server = start(address, "serve.grace=1", OTEL_BSP_SCHEDULE_DELAY="100").wait_ready()
    ask = {"prompt": "def fib(n):\n", "max_tokens": 8, "ignore_eos": True}
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert httpx.post(f"{server.url}/v1/completions", json=ask, headers={"traceparent": parent}).status_code == 200
    until(lambda: bodies)
    collector.shutdown()
    collector.server_close()
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 4}).status_code == 200
    began = time.monotonic()
    assert server.stop() == 0, "".join(server.log)
    assert time.monotonic() - began < 60
    requests = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    (span,) = (
        s for r in requests for resource in r.resource_spans for scope in resource.scope_spans for s in scope.spans
    )
    found = {entry.key: entry.value for entry in span.attributes}
    assert span.name == "completions" and span.trace_id.hex() in parent
    assert found["gen_ai.usage.output_tokens"].int_value == 8
    assert found["gen_ai.response.model"].string_value == "tiny"
    assert [event.name for event in span.events] == ["queued", "decode"]
    assert not any(b"fib" in body for body in bodies), "text of a prompt left the server"
