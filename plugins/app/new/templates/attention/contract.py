"""Suite of the component, with what it serves."""

import torch
from dovetail.core.testing.attention import AttentionContract

from dovetail_mine.attention import Mine
from dovetail_mine.config import MineConfig


class MineContract(AttentionContract):
    tree = False
    kv_dtypes = (torch.bfloat16,)

    def make(self):
        return Mine(MineConfig())
