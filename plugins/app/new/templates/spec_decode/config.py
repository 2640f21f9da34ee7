"""Options of spec_decode=mine."""

from dovetail import Config
from pydantic import Field


class MineConfig(Config):
    """Draft the tokens at a fixed distance before, for periodic text such as tables."""

    every: int = Field(8, ge=1)
    """Distance of the copy, in tokens."""
    lookahead: int = Field(4, ge=1, le=32)
    """Drafts per sequence and step, in tokens."""
