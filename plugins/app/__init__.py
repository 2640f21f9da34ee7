"""Built-in apps."""

from dovetail.core.compose import Component
from dovetail.plugins.app.ablate.config import AblateConfig
from dovetail.plugins.app.bench.config import BenchConfig
from dovetail.plugins.app.check.config import CheckConfig
from dovetail.plugins.app.generate.config import GenerateConfig
from dovetail.plugins.app.new.config import NewConfig
from dovetail.plugins.app.plan.config import PlanConfig
from dovetail.plugins.app.plugins.config import PluginsConfig
from dovetail.plugins.app.quality.config import QualityConfig
from dovetail.plugins.app.quantize.config import QuantizeConfig
from dovetail.plugins.app.replay.config import ReplayConfig
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.tune.config import TuneConfig

COMPONENTS: tuple[Component, ...] = tuple(
    Component(kind="app", name=name, config=config, target=f"dovetail.plugins.app.{name}.app:{target}", api="app/0.1")
    for name, config, target in (
        ("ablate", AblateConfig, "AblateApp"),
        ("bench", BenchConfig, "BenchApp"),
        ("check", CheckConfig, "CheckApp"),
        ("generate", GenerateConfig, "GenerateApp"),
        ("new", NewConfig, "NewApp"),
        ("plan", PlanConfig, "PlanApp"),
        ("plugins", PluginsConfig, "PluginsApp"),
        ("quality", QualityConfig, "QualityApp"),
        ("quantize", QuantizeConfig, "QuantizeApp"),
        ("replay", ReplayConfig, "ReplayApp"),
        ("serve", ServeConfig, "ServeApp"),
        ("tune", TuneConfig, "TuneApp"),
    )
)
