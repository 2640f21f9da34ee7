"""Options of the built-in routers."""

from __future__ import annotations

from pydantic import Field

from dovetail.core.compose import Config


class RoundRobinConfig(Config):
    """Each replica in turn, whatever its load: the baseline."""


class LeastLoadedConfig(Config):
    """The replica with the least outstanding work."""

    sample_tokens: int = Field(512, ge=0)
    """Work of a running or waiting sample, in prompt tokens. 256 output tokens cost a GPU about as much as the prefill
    of 512."""


class PrefixAwareConfig(LeastLoadedConfig):
    """The replica with the least outstanding work plus uncached prompt tokens, estimated from the prompts sent to it.
    When the replica that caches a prefix is busy, the prefix spreads to others."""

    block_tokens: int = Field(64, ge=1)
    """Granularity of the comparison of prefixes, in tokens."""
    blocks: int = Field(32768, ge=1)
    """Number of latest blocks remembered per replica. It should not exceed the size of the KV cache."""
