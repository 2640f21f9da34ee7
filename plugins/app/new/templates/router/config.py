"""Options of router=mine."""

from dovetail import Config
from pydantic import Field


class MineConfig(Config):
    """One replica per user, unless it is too busy."""

    factor: float = Field(2.0, ge=1)
    """A replica is too busy above `factor` times the samples of the least busy one, plus `slack`."""
    slack: int = Field(8, ge=0)
    """See `factor`; samples."""
