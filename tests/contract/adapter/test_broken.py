"""Adapters that violate one sentence of the contract; the suite must reject each by the named test."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from dovetail.core.interfaces import LayerAdapters, LinearSite
from dovetail.plugins.adapter.config import LoRAConfig
from dovetail.plugins.adapter.lora.adapters import LoRA, LoRALayer
from dovetail.plugins.adapter.lora.peft import open_adapter

from ..faults import each, rejects, suite, variant
from .test_builtin import TestLoRA

fault = partial(variant, LoRA)
Tensor = torch.Tensor


def layered(name: str, **members: Any) -> type[LoRA]:
    """LoRA whose layers have other methods."""
    layer = variant(LoRALayer, name, **members)

    def attach(self: LoRA, site: LinearSite) -> LayerAdapters:
        made = LoRA.attach(self, site)
        made.__class__ = layer
        return made

    return fault(name, attach=attach)


def rounds_every_row(self: LoRALayer, x_TI: Tensor, y_TO: Tensor, slots_T: Tensor) -> None:
    y_TO.mul_(1 + 2**-6)
    LoRALayer.apply(self, x_TI, y_TO, slots_T)


def synchronizes(self: LoRALayer, x_TI: Tensor, y_TO: Tensor, slots_T: Tensor) -> None:
    if slots_T.max().item() >= 0:
        LoRALayer.apply(self, x_TI, y_TO, slots_T)


def first_part_alone(self: LoRALayer, host_N: Tensor, adapter: Any) -> None:
    name = self.site.shape.names[0]
    LoRALayer.fill(self, host_N, {name: adapter[name]} if name in adapter else {})


def whole_on_every_rank(self: LoRALayer, x_TI: Tensor, y_TO: Tensor, slots_T: Tensor) -> None:
    """Add the change of all ranks on each of them."""
    LoRALayer.apply(self, x_TI, y_TO, slots_T)
    if self.site.shape.shard == "row" and self.inputs < self.site.whole[0][1]:
        LoRALayer.apply(self, x_TI, y_TO, slots_T)


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


BROKEN: dict[str, list[type[LoRA]]] = {
    "test_rows_without_an_adapter_stay_as_they_are": [layered("RoundsEveryRow", apply=rounds_every_row)],
    "test_a_row_has_the_adapter_of_its_slot": [
        layered(
            "FirstSlotForAll",
            apply=lambda self, x_TI, y_TO, slots_T: LoRALayer.apply(
                self, x_TI, y_TO, torch.where(slots_T >= 0, slots_T[:1].clamp(min=0), -1)
            ),
        )
    ],
    "test_apply_waits_for_nothing": [layered("Synchronizes", apply=synchronizes)],
    "test_matrices_that_an_adapter_lacks_do_not_change": [layered("FirstPartAlone", fill=first_part_alone)],
    "test_ranks_together_equal_one": [layered("WholeOnEveryRank", apply=whole_on_every_rank)],
    "test_all_slots_are_equivalent": [NeverReplaces],
    "test_a_slot_keeps_its_adapter_after_drop": [DropEmptiesSlots],
    "test_reading_in_a_separate_thread": [ReadsLate],
    "test_an_invalid_adapter_is_refused_without_side_effects": [TakesAnything],
    "test_empty_slots_have_no_effect": [Forgetful],
}


@each(BROKEN)
def test_broken_adapters_are_rejected(broken: type[LoRA], test: str) -> None:
    lora = suite(TestLoRA, make=lambda self, device, dtype: broken(LoRAConfig(slots=2), device, dtype))
    assert rejects(lora, test)
