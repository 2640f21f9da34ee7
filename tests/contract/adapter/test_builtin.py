"""Contract suite for the built-in adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from dovetail.core.errors import RequestError
from dovetail.core.interfaces import Adapters
from dovetail.core.testing.adapter import AdaptersContract
from dovetail.plugins.adapter.config import LoRAConfig, NoneConfig
from dovetail.plugins.adapter.lora.adapters import LoRA
from dovetail.plugins.adapter.none import NoAdapters

from .peft_files import factors, save


class TestLoRA(AdaptersContract):
    def make(self, device: torch.device, dtype: torch.dtype) -> Adapters:
        return LoRA(LoRAConfig(slots=2), device, dtype)

    def save(self, folder: Path, matrices: Mapping[str, tuple[int, int]], seed: int) -> None:
        save(folder, factors(matrices, seed))


def test_none_has_no_slots() -> None:
    none = NoAdapters(NoneConfig(), torch.device("cpu"), torch.float32)
    assert none.slots == 0 and not none.initial(none.config)
    with pytest.raises(RequestError, match="adapter=lora"):
        none.read("a", Path())
