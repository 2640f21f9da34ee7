"""Adapters that violate one sentence of the contract; the suite must reject each by the named test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.core.interfaces import LayerAdapters, LinearSite
from dovetail.core.testing.suite import failures
from dovetail.plugins.adapter.config import LoRAConfig
from dovetail.plugins.adapter.lora.adapters import LoRA, LoRALayer
from dovetail.plugins.adapter.lora.peft import open_adapter

from .test_builtin import TestLoRA


class Layered(LoRA):
    """LoRA with a configurable layer class."""

    layer: type[LoRALayer]

    def attach(self, site: LinearSite) -> LayerAdapters:
        made = super().attach(site)
        made.__class__ = self.layer
        return made


class _RoundsEveryRow(LoRALayer):
    def apply(self, x_TI: torch.Tensor, y_TO: torch.Tensor, slots_T: torch.Tensor) -> None:
        y_TO.mul_(1 + 2**-6)
        super().apply(x_TI, y_TO, slots_T)


class RoundsEveryRow(Layered):
    layer = _RoundsEveryRow


class _FirstSlotForAll(LoRALayer):
    def apply(self, x_TI: torch.Tensor, y_TO: torch.Tensor, slots_T: torch.Tensor) -> None:
        super().apply(x_TI, y_TO, torch.where(slots_T >= 0, slots_T[:1].clamp(min=0), -1))


class FirstSlotForAll(Layered):
    layer = _FirstSlotForAll


class _Synchronizes(LoRALayer):
    def apply(self, x_TI: torch.Tensor, y_TO: torch.Tensor, slots_T: torch.Tensor) -> None:
        if slots_T.max().item() >= 0:
            super().apply(x_TI, y_TO, slots_T)


class Synchronizes(Layered):
    layer = _Synchronizes


class _FirstPartAlone(LoRALayer):
    def fill(self, host_N: torch.Tensor, adapter: Any) -> None:
        name = self.site.shape.names[0]
        super().fill(host_N, {name: adapter[name]} if name in adapter else {})


class FirstPartAlone(Layered):
    layer = _FirstPartAlone


class _WholeOnEveryRank(LoRALayer):
    """Adds the change of all ranks on each of them."""

    def apply(self, x_TI: torch.Tensor, y_TO: torch.Tensor, slots_T: torch.Tensor) -> None:
        super().apply(x_TI, y_TO, slots_T)
        if self.site.shape.shard == "row" and self.inputs < self.site.whole[0][1]:
            super().apply(x_TI, y_TO, slots_T)


class WholeOnEveryRank(Layered):
    layer = _WholeOnEveryRank


class NeverReplaces(LoRA):
    def place(self, slot: int, key: str) -> None:
        if slot not in self._placed:
            super().place(slot, key)


class DropEmptiesSlots(LoRA):
    def drop(self, key: str) -> None:
        super().drop(key)
        self._store_SN.zero_()


class ReadsLate(LoRA):
    """Keeps the folder and reads it when the adapter is placed."""

    def read(self, key: str, folder: Path) -> None:
        open_adapter(folder)
        self.__dict__.setdefault("folders", {})[key] = folder

    def place(self, slot: int, key: str) -> None:
        super().read(key, self.__dict__["folders"][key])
        super().place(slot, key)


class TakesAnything(LoRA):
    def _check(self, name: str, factors: Any) -> None: ...

    def read(self, key: str, folder: Path) -> None:
        try:
            super().read(key, folder)
        except RuntimeError:
            self._host[key] = torch.zeros(self._size)


class Forgetful(LoRA):
    """Leaves new memory uninitialized."""

    def allocate(self) -> None:
        super().allocate()
        self._store_SN.normal_()


BROKEN = {
    RoundsEveryRow: "test_rows_without_an_adapter_stay_as_they_are",
    FirstSlotForAll: "test_a_row_has_the_adapter_of_its_slot",
    Synchronizes: "test_apply_waits_for_nothing",
    FirstPartAlone: "test_matrices_that_an_adapter_lacks_do_not_change",
    WholeOnEveryRank: "test_ranks_together_equal_one",
    NeverReplaces: "test_all_slots_are_equivalent",
    DropEmptiesSlots: "test_a_slot_keeps_its_adapter_after_drop",
    ReadsLate: "test_reading_in_a_separate_thread",
    TakesAnything: "test_an_invalid_adapter_is_refused_without_side_effects",
    Forgetful: "test_empty_slots_have_no_effect",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda c: c.__name__)
def test_broken_adapters_are_rejected(broken: type[LoRA]) -> None:
    class Suite(TestLoRA):
        def make(self, device: torch.device, dtype: torch.dtype) -> LoRA:
            return broken(LoRAConfig(slots=2), device, dtype)

    assert BROKEN[broken] in failures(Suite())
