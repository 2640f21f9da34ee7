"""Suite of the component, with the requests that it changes and those that it leaves as they are."""

from dovetail import SamplingParams
from dovetail.core.testing.logits import LogitsProcessorContract

from dovetail_mine.config import MineConfig
from dovetail_mine.logits import Mine


class MineContract(LogitsProcessorContract):
    def make(self):
        return Mine(MineConfig(tokens=100))

    def active_params(self):
        return SamplingParams(temperature=1.0)

    def passive_params(self):
        return SamplingParams(temperature=0.0)
