"""Options of logits=mine."""

from dovetail import Config
from pydantic import Field


class MineConfig(Config):
    """Greedy choice of the first output tokens of a sampled request."""

    tokens: int = Field(4, ge=1)
    """Number of output tokens that are not drawn at random."""
