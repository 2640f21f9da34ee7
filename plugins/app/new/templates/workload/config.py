"""Options of workload=mine."""

from dovetail import Config
from pydantic import Field


class MineConfig(Config):
    """Groups of requests that arrive together, as those of a batch job do."""

    bursts: int = Field(3, ge=1)
    """Number of groups."""
    size: int = Field(4, ge=1)
    """Requests per group."""
    pause: float = Field(0.1, ge=0)
    """Seconds between groups."""
    longest: int = Field(32, ge=1)
    """Maximum number of tokens of a prompt, and of an output."""
