"""Options of observer=mine."""

from dovetail import Config
from pydantic import Field


class MineConfig(Config):
    """Prints the number of fed and sampled tokens to stderr."""

    every: int = Field(100, ge=1)
    """Steps between two lines."""
