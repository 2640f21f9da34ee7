"""Built-in attention backends."""

from dovetail.core.compose import Component
from dovetail.plugins.attention.config import SDPAConfig

COMPONENTS = (
    Component(
        kind="attention",
        name="sdpa",
        config=SDPAConfig,
        target="dovetail.plugins.attention.sdpa.backend:SDPA",
        api="attention/0.1",
        capabilities="dovetail.plugins.attention.sdpa.capabilities:capabilities",
    ),
)
