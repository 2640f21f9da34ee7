"""Built-in cost models."""

from dovetail.plugins import builtin
from dovetail.plugins.cost.config import MeasuredConfig, NoneConfig, RooflineConfig

COMPONENTS = (
    builtin("cost", "measured", MeasuredConfig, "measured:Measured", api="0.2"),
    builtin("cost", "none", NoneConfig, "none:NoEstimate", api="0.2"),
    builtin("cost", "roofline", RooflineConfig, "roofline:Roofline", api="0.2"),
)
