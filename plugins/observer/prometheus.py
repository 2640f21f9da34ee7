"""Metrics of every step over HTTP."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, start_http_server

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import Observer, StepRecord
from dovetail.core.metrics import StepMetrics
from dovetail.plugins.observer.config import PrometheusConfig

log = logging.getLogger(__name__)


class Prometheus(Observer):
    config: PrometheusConfig

    def __init__(self, config: PrometheusConfig) -> None:
        super().__init__(config)
        registry = CollectorRegistry()
        self._metrics = StepMetrics(registry)
        try:
            self._server, self._thread = start_http_server(config.port, config.host, registry)
        except OSError as error:
            raise ConfigError(
                f"observer.prometheus.port={config.port}: cannot listen on {config.host} ({error}); "
                "choose another port, or 0 for a free one"
            ) from None
        self.port = self._server.server_port
        log.info("metrics of every step: http://%s:%d/metrics", config.host, self.port)
        self._open = True

    def step(self, record: StepRecord) -> None:
        self._metrics.step(record)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
