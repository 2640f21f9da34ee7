"""Built-in collectives."""

from dovetail.core.compose import Component
from dovetail.plugins.collective.config import NcclConfig, OrderedConfig, SymmMemConfig

COMPONENTS = (
    Component(
        kind="collective",
        name="nccl",
        config=NcclConfig,
        target="dovetail.plugins.collective.nccl:NcclCollective",
        api="collective/0.1",
        capabilities="dovetail.plugins.collective.capabilities:nccl",
    ),
    Component(
        kind="collective",
        name="ordered",
        config=OrderedConfig,
        target="dovetail.plugins.collective.ordered:OrderedCollective",
        api="collective/0.1",
        capabilities="dovetail.plugins.collective.capabilities:ordered",
    ),
    Component(
        kind="collective",
        name="symm_mem",
        config=SymmMemConfig,
        target="dovetail.plugins.collective.symm_mem.collective:SymmMemCollective",
        api="collective/0.1",
        capabilities="dovetail.plugins.collective.capabilities:symm_mem",
    ),
)
