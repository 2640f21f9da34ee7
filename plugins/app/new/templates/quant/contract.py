"""Suite of the component, with the error of its number format."""

from dovetail.core.testing.quant import QuantizerContract

from dovetail_mine.config import MineConfig
from dovetail_mine.quant import Mine


class MineContract(QuantizerContract):
    error = 4e-3  # eight bits of mantissa

    def make(self):
        return Mine(MineConfig())
