"""Built-in schedulers."""

from dovetail.core.compose import Component
from dovetail.plugins.scheduler.config import FCFSConfig, StaticConfig

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
)
