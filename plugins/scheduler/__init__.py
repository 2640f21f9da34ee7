"""Built-in schedulers."""

from dovetail.core.compose import Component
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
    Component(
        kind="scheduler",
        name="fcfs",
        config=FCFSConfig,
        target="dovetail.plugins.scheduler.fcfs:FCFSScheduler",
        api="scheduler/0.1",
    ),
    Component(
        kind="scheduler",
        name="static",
        config=StaticConfig,
        target="dovetail.plugins.scheduler.static:StaticScheduler",
        api="scheduler/0.1",
    ),
    Component(
        kind="scheduler",
        name="priority",
        config=PriorityConfig,
        target="dovetail.plugins.scheduler.priority:PriorityScheduler",
        api="scheduler/0.1",
    ),
    Component(
        kind="scheduler",
        name="longest_prefix",
        config=LongestPrefixConfig,
        target="dovetail.plugins.scheduler.longest_prefix:LongestPrefixScheduler",
        api="scheduler/0.1",
    ),
    Component(
        kind="scheduler",
        name="shortest_job",
        config=ShortestJobConfig,
        target="dovetail.plugins.scheduler.shortest_job:ShortestJobScheduler",
        api="scheduler/0.1",
    ),
    Component(
        kind="scheduler",
        name="fair",
        config=FairConfig,
        target="dovetail.plugins.scheduler.fair:FairScheduler",
        api="scheduler/0.1",
    ),
    Component(
        kind="scheduler",
        name="deadline",
        config=DeadlineConfig,
        target="dovetail.plugins.scheduler.deadline:DeadlineScheduler",
        api="scheduler/0.1",
    ),
)
