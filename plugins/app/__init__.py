"""Built-in apps."""

from dovetail.core.compose import Component
from dovetail.plugins.app.ablate.config import AblateConfig
from dovetail.plugins.app.bench.config import BenchConfig
from dovetail.plugins.app.generate.config import GenerateConfig
from dovetail.plugins.app.plan.config import PlanConfig
from dovetail.plugins.app.plugins.config import PluginsConfig
from dovetail.plugins.app.serve.config import ServeConfig

COMPONENTS: tuple[Component, ...] = (
    Component(
        kind="app",
        name="ablate",
        config=AblateConfig,
        target="dovetail.plugins.app.ablate.app:AblateApp",
        api="app/0.1",
    ),
    Component(
        kind="app",
        name="bench",
        config=BenchConfig,
        target="dovetail.plugins.app.bench.app:BenchApp",
        api="app/0.1",
    ),
    Component(
        kind="app",
        name="generate",
        config=GenerateConfig,
        target="dovetail.plugins.app.generate.app:GenerateApp",
        api="app/0.1",
    ),
    Component(
        kind="app",
        name="plan",
        config=PlanConfig,
        target="dovetail.plugins.app.plan.app:PlanApp",
        api="app/0.1",
    ),
    Component(
        kind="app",
        name="plugins",
        config=PluginsConfig,
        target="dovetail.plugins.app.plugins.app:PluginsApp",
        api="app/0.1",
    ),
    Component(
        kind="app",
        name="serve",
        config=ServeConfig,
        target="dovetail.plugins.app.serve.app:ServeApp",
        api="app/0.1",
    ),
)
