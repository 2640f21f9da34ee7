"""Built-in cost models."""

from dovetail.core.compose import Component
from dovetail.plugins.cost.config import NoneConfig, RooflineConfig

COMPONENTS = (
    Component(
        kind="cost",
        name="none",
        config=NoneConfig,
        target="dovetail.plugins.cost.none:NoEstimate",
        api="cost/0.1",
    ),
    Component(
        kind="cost",
        name="roofline",
        config=RooflineConfig,
        target="dovetail.plugins.cost.roofline:Roofline",
        api="cost/0.1",
    ),
)
