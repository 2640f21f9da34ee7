"""Options of the built-in logits processors. Their parameters are set per request."""

from __future__ import annotations

from dovetail.core.compose import Config


class PenaltiesConfig(Config):
    """Repetition, presence and frequency penalties."""


class LogitBiasConfig(Config):
    """Adds the request's logit_bias."""


class MinTokensConfig(Config):
    """Masks EOS and stop tokens until the output has min_tokens."""
