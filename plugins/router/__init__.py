"""Built-in routers."""

from dovetail.core.compose import Component
from dovetail.plugins.router.config import LeastLoadedConfig, PrefixAwareConfig, RoundRobinConfig

COMPONENTS = (
    Component(
        kind="router",
        name="least_loaded",
        config=LeastLoadedConfig,
        target="dovetail.plugins.router.load:LeastLoaded",
        api="router/0.1",
    ),
    Component(
        kind="router",
        name="prefix_aware",
        config=PrefixAwareConfig,
        target="dovetail.plugins.router.load:PrefixAware",
        api="router/0.1",
    ),
    Component(
        kind="router",
        name="round_robin",
        config=RoundRobinConfig,
        target="dovetail.plugins.router.round_robin:RoundRobin",
        api="router/0.1",
    ),
)
