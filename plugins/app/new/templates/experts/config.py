"""Options of experts=mine."""

from dovetail import Config
from pydantic import Field


class MineConfig(Config):
    """Experts dealt to the ranks in turn; the first ones are on every rank."""

    copies: int = Field(1, ge=0)
    """Number of first experts that every rank has."""
