"""Options of the built-in placements."""

from __future__ import annotations

from dovetail.core.compose import Config


class TensorConfig(Config):
    """Every rank has some channels of each expert, and multiplies every row."""


class WholeConfig(Config):
    """Ranks have different experts. Every rank has all rows; the next sum over ranks adds the experts' outputs."""
