"""Built-in observers."""

from dovetail.plugins import builtin
from dovetail.plugins.observer.config import PrometheusConfig

COMPONENTS = (builtin("observer", "prometheus", PrometheusConfig, "prometheus:Prometheus"),)
