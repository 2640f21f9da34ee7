"""Options of the built-in routers."""

from __future__ import annotations

from pydantic import Field

from dovetail.core.compose import Config


class RoundRobinConfig(Config):
    """Each replica in turn, whatever it has to do: the baseline."""


class LeastLoadedConfig(Config):
    """The replica with the least work before it."""

    sample_tokens: int = Field(512, ge=0)
    """Work of a sample that runs or waits, in prompt tokens. 256 output tokens cost a GPU about as much as the prefill
    of 512."""


class PrefixAwareConfig(LeastLoadedConfig):
    """The replica that would be done with the prompt first: the work before it, and what of the prompt it has not
    cached, judged by the prompts it was sent. A prefix so gets more replicas when the first one is busy."""

    block_tokens: int = Field(64, ge=1)
    """Tokens by which prefixes are compared."""
    blocks: int = Field(32768, ge=1)
    """Blocks remembered per replica, the latest. More than its KV cache holds would promise what is gone."""
