"""Options of attention=mine."""

from dovetail import Config


class MineConfig(Config):
    """Attention one token at a time, on the CPU: for reading, not for speed."""

    double: bool = False
    """Whether scores and sums are computed in float64 instead of the model's dtype."""
