"""Built-in logits processors."""

from dovetail.plugins import builtin
from dovetail.plugins.logits.config import LogitBiasConfig, MinTokensConfig, PenaltiesConfig

COMPONENTS = (
    builtin("logits", "penalties", PenaltiesConfig, "penalties:Penalties", api="0.2"),
    builtin("logits", "logit_bias", LogitBiasConfig, "logit_bias:LogitBias", api="0.2"),
    builtin("logits", "min_tokens", MinTokensConfig, "min_tokens:MinTokens", api="0.2"),
)
