"""Built-in logits processors."""

from dovetail.core.compose import Component
from dovetail.plugins.logits.config import LogitBiasConfig, MinTokensConfig, PenaltiesConfig

COMPONENTS = (
    Component(
        kind="logits",
        name="penalties",
        config=PenaltiesConfig,
        target="dovetail.plugins.logits.penalties:Penalties",
        api="logits/0.1",
    ),
    Component(
        kind="logits",
        name="logit_bias",
        config=LogitBiasConfig,
        target="dovetail.plugins.logits.logit_bias:LogitBias",
        api="logits/0.1",
    ),
    Component(
        kind="logits",
        name="min_tokens",
        config=MinTokensConfig,
        target="dovetail.plugins.logits.min_tokens:MinTokens",
        api="logits/0.1",
    ),
)
