"""Built-in collectives."""

from dovetail.plugins import builtin
from dovetail.plugins.collective.config import NcclConfig, OrderedConfig, SymmMemConfig

COMPONENTS = (
    builtin("collective", "nccl", NcclConfig, "nccl:NcclCollective", capabilities="capabilities:nccl", api="0.3"),
    builtin(
        "collective",
        "ordered",
        OrderedConfig,
        "ordered:OrderedCollective",
        capabilities="capabilities:ordered",
        api="0.3",
    ),
    builtin(
        "collective",
        "symm_mem",
        SymmMemConfig,
        "symm_mem.collective:SymmMemCollective",
        capabilities="capabilities:symm_mem",
        api="0.3",
    ),
)
