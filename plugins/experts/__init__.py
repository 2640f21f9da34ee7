"""Built-in placements of routed experts."""

from dovetail.plugins import builtin
from dovetail.plugins.experts.config import AllToAllConfig, GatherConfig, TensorConfig, WholeConfig

COMPONENTS = (
    builtin("experts", "tensor", TensorConfig, "everywhere:TensorPlacement"),
    builtin("experts", "whole", WholeConfig, "everywhere:WholePlacement", capabilities="capabilities:whole"),
    builtin("experts", "gather", GatherConfig, "own_rows:GatherPlacement", capabilities="capabilities:gather"),
    builtin(
        "experts", "all_to_all", AllToAllConfig, "own_rows:AllToAllPlacement", capabilities="capabilities:all_to_all"
    ),
)
