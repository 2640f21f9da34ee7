"""Built-in routers."""

from dovetail.plugins import builtin
from dovetail.plugins.router.config import LeastLoadedConfig, PrefixAwareConfig, RoundRobinConfig

COMPONENTS = (
    builtin("router", "least_loaded", LeastLoadedConfig, "load:LeastLoaded"),
    builtin("router", "prefix_aware", PrefixAwareConfig, "load:PrefixAware"),
    builtin("router", "round_robin", RoundRobinConfig, "round_robin:RoundRobin"),
)
