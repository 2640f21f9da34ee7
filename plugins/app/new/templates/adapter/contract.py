"""Suite of the component, with random adapters in its format."""

import torch
from dovetail.core.testing.adapter import AdaptersContract
from safetensors.torch import save_file

from dovetail_mine.adapter import Mine
from dovetail_mine.config import MineConfig


class MineContract(AdaptersContract):
    def make(self, device, dtype):
        return Mine(MineConfig(), device, dtype)

    def save(self, folder, matrices, seed):
        torch.manual_seed(seed)
        scales = {name: 2 + torch.rand(outputs) for name, (outputs, _) in matrices.items()}
        save_file(scales, folder / "scales.safetensors")
