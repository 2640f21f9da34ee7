"""Options of model=mine."""

from dovetail import Config
from pydantic import Field


class MineConfig(Config):
    """A Llama of one layer, with random weights."""

    vocab: int = Field(256, ge=2)
    """Number of token ids."""
    hidden: int = Field(32, ge=8, multiple_of=8)
    """Channels, divided over 4 heads."""
