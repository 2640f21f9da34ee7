"""Options of kv_cache=mine."""

from dovetail import Config


class MineConfig(Config):
    """Pages without reuse of prefixes; the free page with the lowest or the highest id is used first."""

    lowest_first: bool = True
    """Whether the lowest free page is used first, so that pages in use stay close together."""
