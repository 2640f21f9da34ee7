"""Built-in executors."""

from dovetail.core.compose import Component
from dovetail.plugins.executor.config import InprocConfig, MultiprocConfig, SimulatedConfig

COMPONENTS = (
    Component(
        kind="executor",
        name="inproc",
        config=InprocConfig,
        target="dovetail.plugins.executor.inproc:InprocExecutor",
        api="executor/0.1",
        capabilities="dovetail.plugins.executor.capabilities:inproc",
    ),
    Component(
        kind="executor",
        name="multiproc",
        config=MultiprocConfig,
        target="dovetail.plugins.executor.multiproc:MultiprocExecutor",
        api="executor/0.1",
        capabilities="dovetail.plugins.executor.capabilities:multiproc",
    ),
    Component(
        kind="executor",
        name="simulated",
        config=SimulatedConfig,
        target="dovetail.plugins.executor.simulated:SimulatedExecutor",
        api="executor/0.1",
        capabilities="dovetail.plugins.executor.capabilities:simulated",
    ),
)
