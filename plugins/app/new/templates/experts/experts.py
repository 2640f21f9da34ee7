"""Experts dealt to the ranks in turn, like cards."""

from dovetail.core.interfaces import ExpertPlacement

from dovetail_mine.config import MineConfig


class Mine(ExpertPlacement):
    config: MineConfig

    def layout(self, experts, rank, size):
        """A rank has every `size`-th expert. Tokens take the copies of an expert in turn."""
        dealt = list(range(rank, experts, size))
        return dealt + [expert for expert in range(min(self.config.copies, experts)) if expert % size != rank]
