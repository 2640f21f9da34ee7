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
    builtin("scheduler", "fcfs", FCFSConfig, "fcfs:FCFSScheduler"),
    builtin("scheduler", "static", StaticConfig, "static:StaticScheduler"),
    builtin("scheduler", "priority", PriorityConfig, "priority:PriorityScheduler"),
    builtin("scheduler", "longest_prefix", LongestPrefixConfig, "longest_prefix:LongestPrefixScheduler"),
    builtin("scheduler", "shortest_job", ShortestJobConfig, "shortest_job:ShortestJobScheduler"),
    builtin("scheduler", "fair", FairConfig, "fair:FairScheduler"),
    builtin("scheduler", "deadline", DeadlineConfig, "deadline:DeadlineScheduler"),
)
