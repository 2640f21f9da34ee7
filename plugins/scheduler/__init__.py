"""Built-in schedulers."""

from dovetail.plugins import builtin
from dovetail.plugins.scheduler.config import (
    DeadlineConfig,
    FairConfig,
    FCFSConfig,
    LongestPrefixConfig,
    PriorityConfig,
    ShortestJobConfig,
    StaticConfig,
)

COMPONENTS = (
    builtin("scheduler", "fcfs", FCFSConfig, "fcfs:FCFSScheduler", api="0.3"),
    builtin("scheduler", "static", StaticConfig, "static:StaticScheduler", api="0.3"),
    builtin("scheduler", "priority", PriorityConfig, "priority:PriorityScheduler", api="0.3"),
    builtin("scheduler", "longest_prefix", LongestPrefixConfig, "longest_prefix:LongestPrefixScheduler", api="0.3"),
    builtin("scheduler", "shortest_job", ShortestJobConfig, "shortest_job:ShortestJobScheduler", api="0.3"),
    builtin("scheduler", "fair", FairConfig, "fair:FairScheduler", api="0.3"),
    builtin("scheduler", "deadline", DeadlineConfig, "deadline:DeadlineScheduler", api="0.3"),
)
