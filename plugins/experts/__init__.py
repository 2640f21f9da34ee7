"""Built-in placements of routed experts."""

from dovetail.plugins import builtin
from dovetail.plugins.experts.config import TensorConfig, WholeConfig

COMPONENTS = (
    builtin("experts", "tensor", TensorConfig, "everywhere:TensorPlacement"),
    builtin("experts", "whole", WholeConfig, "everywhere:WholePlacement", capabilities="capabilities:placed"),
)
