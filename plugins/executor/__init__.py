"""Built-in executors."""

from dovetail.plugins import builtin
from dovetail.plugins.executor.config import InprocConfig, MultiprocConfig, SimulatedConfig

COMPONENTS = (
    builtin("executor", "inproc", InprocConfig, "inproc:InprocExecutor", capabilities="capabilities:inproc", api="0.2"),
    builtin(
        "executor",
        "multiproc",
        MultiprocConfig,
        "multiproc:MultiprocExecutor",
        capabilities="capabilities:multiproc",
        api="0.2",
    ),
    builtin(
        "executor",
        "simulated",
        SimulatedConfig,
        "simulated:SimulatedExecutor",
        capabilities="capabilities:simulated",
        api="0.2",
    ),
)
