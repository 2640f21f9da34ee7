"""Weights that cannot fit are told before anything is loaded, with settings under which they would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dovetail.core.compose import Host, Selected
from dovetail.core.engine.cost import number_format
from dovetail.core.errors import CapacityError, DovetailError

if TYPE_CHECKING:
    from dovetail.core.compose import Composition
    from dovetail.core.interfaces import ModelSpec

MOST_GPUS = 16


def check_weights_fit(composition: Composition, spec: ModelSpec, host: Host) -> None:
    """CapacityError if the weights alone exceed what the engine may take of a device. Silent where a model cannot count
    its parameters or a quantizer does not state its `weight_bits`: then allocating them tells. An executor may hold
    none."""
    if spec.parameters is None or not host.memory_bytes:
        return
    if not composition.part("executor").capabilities(host).provides.get("holds_weights", True):
        return
    weights, quant = _Weights(composition, spec, host), composition.part("quant")
    bits = 8.0 * weights.size if quant.name == "none" else _weight_bits(quant, host)
    if bits is None:
        return
    missing = weights.missing(bits, composition.engine.tp, composition.engine.memory_fraction)
    if missing > 0:
        size = weights.bytes(bits, composition.engine.tp)
        what = f"{spec.architecture} has {size / 2**30:.1f} GiB of weights a device, which has"
        raise CapacityError(
            f"{what} {host.memory_bytes / 2**30:.1f} GiB x engine.memory_fraction={composition.engine.memory_fraction}",
            missing_bytes=int(missing),
            settings=[words for words, _ in zip(weights.remedies(bits), range(3), strict=False)],
        )


class _Weights:
    def __init__(self, composition: Composition, spec: ModelSpec, host: Host) -> None:
        self.composition, self.spec, self.host = composition, spec, host
        _, self.size = number_format(composition.engine, spec, host.device)

    def bytes(self, bits: float, tp: int) -> float:
        """On one device. Ranks on a CPU share its memory."""
        p = self.spec.parameters
        assert p is not None
        quantized = (p.attention + p.mlp + p.experts) * bits / 8
        total = quantized + (p.embedding + p.head + p.rest) * self.size
        return total / tp if self.host.device == "cuda" else total

    def missing(self, bits: float, tp: int, fraction: float) -> float:
        return self.bytes(bits, tp) - self.host.memory_bytes * fraction

    def remedies(self, bits: float) -> Iterator[str]:
        """Single changes first, each one computed."""
        engine = self.composition.engine
        if engine.memory_fraction < 0.95 and self.missing(bits, engine.tp, 0.95) <= 0:
            yield "engine.memory_fraction=0.95"
        smaller = list(self._smaller(bits))
        for name, fewer in smaller:
            if self.missing(fewer, engine.tp, engine.memory_fraction) <= 0:
                yield f"quant={name}"
        for words, each in [("", bits), *((f" quant={name}", fewer) for name, fewer in smaller)]:
            for tp in self._ranks():
                if self.missing(each, tp, engine.memory_fraction) <= 0:
                    yield f"engine.tp={tp} executor=multiproc{words}"
                    break

    def _smaller(self, bits: float) -> Iterator[tuple[str, float]]:
        registry = self.composition.registry
        for name in registry.options("quant"):
            try:
                registered = registry.get("quant", name)
                fewer = _weight_bits(Selected(registered, registered.component.config()), self.host)
            except (DovetailError, ValueError):
                continue  # one that cannot be used, or not without options, is no remedy
            if fewer is not None and fewer < bits:
                yield name, fewer

    def _ranks(self) -> list[int]:
        if self.host.device != "cuda":
            return []
        return [tp for tp in model_ranks(self.composition, self.host, MOST_GPUS) if tp > self.composition.engine.tp]


def model_ranks(composition: Composition, host: Host, most: int) -> list[int]:
    """Values of engine.tp up to `most` that the model takes, by the demands that are checked at start."""
    stated = composition.part("model").capabilities(host).requires
    demands = [demand for demand in stated if (demand.kind, demand.key) == ("engine", "tp")]
    return [tp for tp in range(1, most + 1) if all(demand.admits(tp) for demand in demands)]


def _weight_bits(quant: Selected, host: Host) -> float | None:
    """None = it does not say, or not for this host."""
    stated = quant.capabilities(host)
    bits = stated.provides.get("weight_bits")
    runs = all(d.admits(getattr(host, d.key)) for d in stated.requires if d.kind == "host")
    return float(bits) if isinstance(bits, int | float) and runs else None
