"""Suite of the component, which serves one kind of grammar."""

from dovetail.core.testing.grammar import GrammarContract

from dovetail_mine.config import MineConfig
from dovetail_mine.grammar import Mine


class MineContract(GrammarContract):
    kinds = ("choice",)

    def make(self, vocabulary):
        return Mine(MineConfig(), vocabulary)
