"""Options of the built-in observers."""

from __future__ import annotations

from pydantic import Field

from dovetail.core.compose import Config


class PrometheusConfig(Config):
    """Metrics of every step for Prometheus, on a port of the engine. The server's /metrics is independent of it."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 = all interfaces."""
    port: int = Field(9400, ge=0, le=65535)
    """Port to listen on; 0 = a free one, which is logged."""
