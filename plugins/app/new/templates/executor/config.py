"""Options of executor=mine."""

from dovetail import Config


class MineConfig(Config):
    """One rank in this process."""

    log: bool = False
    """Whether each plan is printed to stderr."""
