"""Built-in logits processors."""

from dovetail.plugins import builtin
from dovetail.plugins.logits.config import LogitBiasConfig, MinTokensConfig, PenaltiesConfig

COMPONENTS = (
    builtin("logits", "penalties", PenaltiesConfig, "penalties:Penalties"),
    builtin("logits", "logit_bias", LogitBiasConfig, "logit_bias:LogitBias"),
    builtin("logits", "min_tokens", MinTokensConfig, "min_tokens:MinTokens"),
)
