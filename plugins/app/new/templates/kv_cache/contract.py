"""Suite of the component, which states that it finds no prefixes of other sequences."""

from dovetail.core.testing.kv_cache import KVAllocatorContract

from dovetail_mine.config import MineConfig
from dovetail_mine.kv_cache import Mine


class MineContract(KVAllocatorContract):
    reuses = False

    def make(self, groups, num_pages):
        return Mine(MineConfig(), groups, num_pages)
