"""Options of tool_parser=mine."""

from typing import Literal

from dovetail import Config


class MineConfig(Config):
    """Calls of the form `@name{...}`: a mark, the name of a tool, its arguments."""

    mark: Literal["@", "#"] = "@"
    """First character of a call."""
