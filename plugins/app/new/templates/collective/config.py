"""Options of collective=mine."""

from dovetail import Config
from pydantic import Field


class MineConfig(Config):
    """gloo between processes on a CPU; sums run in float64."""

    poll: float = Field(0.005, gt=0)
    """Seconds between two looks for the other ranks while connecting."""
