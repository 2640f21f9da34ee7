"""Options of cost=mine."""

from dovetail import Config
from pydantic import Field


class MineConfig(Config):
    """A fixed time per step, and a time per token."""

    step: float = Field(2e-3, ge=0)
    """Seconds per step."""
    token: float = Field(1e-5, ge=0)
    """Seconds per token fed."""
