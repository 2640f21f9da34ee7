"""Options of quant=mine."""

from typing import Literal

from dovetail import Config


class MineConfig(Config):
    """Weights stored in 16 bits, matmuls in the model's dtype."""

    stored: Literal["bfloat16", "float16"] = "bfloat16"
    """Dtype of the stored weights."""
