"""Options of grammar=mine."""

from dovetail import Config
from pydantic import Field


class MineConfig(Config):
    """Only choices, by comparison of texts."""

    longest: int = Field(10_000, ge=1)
    """Maximum number of characters of all strings of a choice."""
