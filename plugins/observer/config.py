"""Options of the built-in observers."""

from __future__ import annotations

from pydantic import Field

from dovetail.core.compose import Config


class PrometheusConfig(Config):
    """Metrics of every step, for Prometheus to read from a port of the engine's own. A server has /metrics besides."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface."""
    port: int = Field(9400, ge=0, le=65535)
    """0: a free one, which the log names."""
