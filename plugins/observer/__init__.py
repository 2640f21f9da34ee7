"""Built-in observers."""

from dovetail.core.compose import Component
from dovetail.plugins.observer.config import PrometheusConfig

COMPONENTS = (
    Component(
        kind="observer",
        name="prometheus",
        config=PrometheusConfig,
        target="dovetail.plugins.observer.prometheus:Prometheus",
        api="observer/0.1",
    ),
)
