"""Options of scheduler=mine."""

from dovetail import Config
from pydantic import Field


class MineConfig(Config):
    """Shortest prompt first, with a limit on the time that a request waits."""

    max_wait: float = Field(10.0, ge=0)
    """Seconds from arrival after which a request goes before all others."""
