"""Options of reasoning_parser=mine."""

from typing import Literal

from dovetail import Config


class MineConfig(Config):
    """Reasoning between two tags, such as [thoughts] and [/thoughts]."""

    tag: Literal["thoughts", "plan"] = "thoughts"
    """Name of the tags."""
