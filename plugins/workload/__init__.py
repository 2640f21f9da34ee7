"""Built-in workloads."""

from dovetail.core.compose import Component
from dovetail.plugins.workload.config import (
    FixedConfig,
    PoissonConfig,
    SharedPrefixConfig,
    ShareGPTConfig,
    TraceConfig,
)

COMPONENTS = (
    Component(
        kind="workload",
        name="fixed",
        config=FixedConfig,
        target="dovetail.plugins.workload.synthetic:Fixed",
        api="workload/0.1",
    ),
    Component(
        kind="workload",
        name="poisson",
        config=PoissonConfig,
        target="dovetail.plugins.workload.synthetic:Poisson",
        api="workload/0.1",
    ),
    Component(
        kind="workload",
        name="shared_prefix",
        config=SharedPrefixConfig,
        target="dovetail.plugins.workload.synthetic:SharedPrefix",
        api="workload/0.1",
    ),
    Component(
        kind="workload",
        name="sharegpt",
        config=ShareGPTConfig,
        target="dovetail.plugins.workload.files:ShareGPT",
        api="workload/0.1",
    ),
    Component(
        kind="workload",
        name="trace",
        config=TraceConfig,
        target="dovetail.plugins.workload.files:Trace",
        api="workload/0.1",
    ),
)
