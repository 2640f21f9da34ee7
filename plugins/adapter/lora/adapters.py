"""LoRA adapters on one rank: every adapter's factors in host memory, those of active adapters in slots on the device.

A slot is one row of memory with every layer's factors. A host copy has the same layout, so placing an adapter is one
copy. B is scaled when it is read; smaller ranks are padded with zeros.

Shapes: T tokens, I input, O output, S slots, P parts of a merged layer, R rank, N numbers of a slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import RequestError, shown
from dovetail.core.interfaces import Adapters, LayerAdapters, LinearSite, ModelSpec
from dovetail.plugins.adapter.config import LoRAConfig
from dovetail.plugins.adapter.lora.peft import WEIGHTS, Factors, open_adapter
from dovetail.plugins.adapter.lora.reference import lora_reference

_ALIGNED = 64
"""Alignment of each layer's factors, in numbers."""


class LoRALayer(LayerAdapters):
    """Factors of one layer: A of each part, then B."""

    def __init__(self, site: LinearSite, config: LoRAConfig, start: int, device: torch.device) -> None:
        self.site, self.rank, self.start = site, config.max_rank, start
        self.parts, self.inputs = site.shape.parts, site.shape.inp
        self.a_size = len(self.parts) * self.rank * self.inputs
        self.stop = start + sum(config.numbers(self.inputs, outputs) for outputs in self.parts)
        if device.type == "cuda":
            from dovetail.plugins.adapter.lora.kernel import output_blocks

            self._blocks = output_blocks(self.parts, device)

    def bind(self, store_SN: torch.Tensor) -> None:
        self.a_SPRI, self.b_SOR = self._views(store_SN)

    def _views(self, store_SN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a_SN, b_SN = store_SN[:, self.start : self.stop].tensor_split([self.a_size], dim=1)
        shape = len(self.parts), self.rank, self.inputs
        return a_SN.unflatten(1, shape), b_SN.unflatten(1, (-1, self.rank))

    def apply(self, x_TI: torch.Tensor, y_TO: torch.Tensor, slots_T: torch.Tensor) -> None:
        if x_TI.is_cuda:
            from dovetail.plugins.adapter.lora.kernel import lora_triton

            lora_triton(x_TI, y_TO, self.a_SPRI, self.b_SOR, slots_T, self._blocks)
        else:
            lora_reference(x_TI, y_TO, self.a_SPRI, self.b_SOR, slots_T, self.parts)

    def fill(self, host_N: torch.Tensor, adapter: Mapping[str, Factors]) -> None:
        """Write this rank's shard of the adapter's factors for the layer."""
        (a_PRI,), (b_OR,) = self._views(host_N[None])
        for part, (name, b_oR) in enumerate(zip(self.site.shape.names, b_OR.split(self.parts), strict=True)):
            if (factors := adapter.get(name)) is not None:
                a_PRI[part, : factors.rank] = self.site.input_share(factors.a)
                b_oR[:, : factors.rank] = self.site.output_share(part, factors.b).float() * factors.scale


class LoRA(Adapters):
    config: LoRAConfig

    def __init__(self, config: LoRAConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, device, dtype)
        self._layers: list[LoRALayer] = []
        self._whole: dict[str, tuple[int, int]] = {}
        """Checkpoint prefix -> (outputs, inputs) of every matrix that an adapter may change."""
        self._size = 0
        self._host: dict[str, torch.Tensor] = {}
        self._placed: dict[int, str] = {}

    @classmethod
    def initial(cls, config: LoRAConfig) -> Mapping[str, str]:
        return config.load

    @classmethod
    def check(cls, config: LoRAConfig, folder: Path, spec: ModelSpec) -> None:
        routed = [name for name in open_adapter(folder) if spec.moe is not None and ".experts." in name]
        if routed:
            raise RequestError(
                f"adapter: {folder / WEIGHTS} changes {shown(routed[0])}, and routed experts take no adapters. Leave "
                "its tensors of experts out"
            )

    @property
    def slots(self) -> int:
        return self.config.slots

    def attach(self, site: LinearSite) -> LayerAdapters:
        start = ceil_div(self._size, _ALIGNED) * _ALIGNED
        layer = LoRALayer(site, self.config, start, self.device)
        self._layers.append(layer)
        self._size = layer.stop
        self._whole.update(zip(site.shape.names, site.whole, strict=True))
        return layer

    def allocate(self) -> None:
        self._store_SN = torch.zeros(self.slots, self._size, dtype=self.dtype, device=self.device)
        for layer in self._layers:
            layer.bind(self._store_SN)

    def read(self, key: str, folder: Path) -> None:
        if len(self._host) >= self.config.max_loaded:
            raise RequestError(
                f"adapter: {len(self._host)} adapters are loaded, the limit is {self.config.max_loaded} "
                "(adapter.max_loaded): unload one"
            )
        adapter = open_adapter(folder)
        for name, factors in adapter.items():
            self._check(name, factors)
        host_N = torch.zeros(self._size, dtype=self.dtype, pin_memory=self.device.type == "cuda")
        for layer in self._layers:
            layer.fill(host_N, adapter)
        if not host_N.isfinite().all():
            raise RequestError(f"adapter: {self._not_finite(adapter)} has numbers that are not finite in {self.dtype}")
        self._host[key] = host_N

    def _not_finite(self, adapter: Mapping[str, Factors]) -> str:
        """Return the name of the first matrix that has such numbers."""
        for name, factors in adapter.items():
            for values, scale in ((factors.a[:], 1.0), (factors.b[:], factors.scale)):
                if not (values.float() * scale).to(self.dtype).isfinite().all():
                    return name
        return WEIGHTS

    def _check(self, name: str, factors: Factors) -> None:
        if name not in self._whole:
            known = sorted({prefix.rpartition(".")[2] for prefix in self._whole})
            routed = ". Routed experts take no adapters" if ".experts." in name else ""
            raise RequestError(
                f"adapter: the model has no linear layer {shown(name)} to adapt; it has {', '.join(known)}{routed}"
            )
        if factors.rank > self.config.max_rank:
            raise RequestError(
                f"adapter: {name} has rank {factors.rank}, and slots hold at most {self.config.max_rank} "
                "(adapter.max_rank=16, 32 or 64)"
            )
        outputs, inputs = self._whole[name]
        found = factors.b.get_shape()[0], factors.a.get_shape()[1]
        if found != (outputs, inputs):
            raise RequestError(
                f"adapter: {name} maps {found[1]} inputs to {found[0]} outputs, and this model's maps {inputs} to "
                f"{outputs}: it was trained on another base model"
            )

    def place(self, slot: int, key: str) -> None:
        if self._placed.get(slot) != key:
            self._store_SN[slot].copy_(self._host[key], non_blocking=True)
            self._placed[slot] = key

    def drop(self, key: str) -> None:
        self._host.pop(key, None)
