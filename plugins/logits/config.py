"""Options of the built-in logits processors: what they do is set per request."""

from __future__ import annotations

from dovetail.core.compose import Config


class PenaltiesConfig(Config):
    """Repetition, presence and frequency penalties."""


class LogitBiasConfig(Config):
    """Adds a request's logit_bias."""


class MinTokensConfig(Config):
    """Forbids EOS and stop tokens until min_tokens are out."""
