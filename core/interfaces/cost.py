"""The cost seam: predicts how long a step takes. One component for scheduler, simulator, planner and adaptive
drafting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces.plan import RowFlag

if TYPE_CHECKING:
    from dovetail.core.compose import EngineConfig
    from dovetail.core.interfaces.model import ModelSpec, Parameters
    from dovetail.core.interfaces.plan import Row, StepPlan


@dataclass(frozen=True, slots=True)
class Formats:
    """Number formats of a composition, as far as they cost time and memory."""

    dtype: str
    """Of activations, embedding, logits and attention: "bfloat16", "float16" or "float32"."""
    dtype_bytes: int
    weight_bits: float
    """Of one weight in a linear layer, with its share of scales."""
    product: str
    """Number format in which linear layers multiply: `dtype`, "fp8", "int8", "fp4"."""
    kv_bytes: int
    """Of one cached value."""


class RowWork(NamedTuple):
    """One row of a step, real or hypothetical."""

    tokens: int
    """Fed."""
    bound: int
    """KV length after the step."""
    sampled: int = 1
    """Positions whose logits are computed."""
    times: int = 1
    """Rows like this one."""

    @classmethod
    def of(cls, row: Row) -> RowWork:
        return cls(row.count, row.bound, row.draft + 1 if row.flags & RowFlag.SAMPLE else 0)


class CostModel(ABC):
    """Built as `Class(config)`, then bound to a model. Every other method is valid after that, pure and light: no torch
    and no device, so planner and simulator need none. Seconds are from a step's start to its end; with pipeline
    parallelism other steps run meanwhile."""

    predicts = True
    """False = "off": nobody asks, and a scheduler finds no cost model in its context."""

    def __init__(self, config: object) -> None:
        self.config = config

    def bind(self, spec: ModelSpec, engine: EngineConfig, formats: Formats) -> None:
        """Take the model and how it is laid out over GPUs, once. Raises ConfigError for what it cannot predict."""
        self.spec, self.engine, self.formats = spec, engine, formats

    @abstractmethod
    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        """Device time of a step of these rows. 0.0 for none."""

    def seconds(self, plan: StepPlan) -> float:
        """Device time of the plan."""
        return self.step_seconds(RowWork.of(row) for row in plan.rows)

    def decode_seconds(self, batch: int, context: int) -> float:
        """A step that gives each of `batch` sequences one token: the time per output token."""
        return self.step_seconds([RowWork(1, context, times=batch)])

    def prefill_seconds(self, tokens: int, cached: int = 0, chunk: int | None = None) -> float:
        """To feed a prompt's `tokens` after `cached` ones, alone, in steps of at most `chunk` (default:
        engine.token_budget)."""
        chunk, end = chunk or self.engine.token_budget, cached + tokens
        bounds = [*range(cached + chunk, end, chunk), end]
        return sum(
            self.step_seconds([RowWork(bound - start, bound, int(bound == end))])
            for start, bound in zip([cached, *bounds], bounds, strict=False)
        )

    # Bytes follow from shapes and formats alone. They stand here so that whoever predicts time also answers for memory.

    def weight_bytes(self) -> float:
        """All weights, over all ranks."""
        p = self._parameters
        return self.step_weight_bytes() + (p.embedding * self.formats.dtype_bytes if p.head else 0)

    def step_weight_bytes(self, tokens: int | None = None) -> float:
        """Weights that a step of so many tokens reads, over all ranks: all but the embedding table, and of the routed
        experts those that some token chose, if they choose at random. None = all experts."""
        p = self._parameters
        experts = float(p.experts)
        if tokens is not None and p.experts:
            experts *= 1 - (1 - p.active_experts / p.experts) ** tokens
        quantized = (p.attention + p.mlp + experts) * self.formats.weight_bits / 8
        return quantized + ((p.head or p.embedding) + p.rest) * self.formats.dtype_bytes

    def kv_bytes(self, tokens: int) -> int:
        """KV cache of a sequence of so many tokens, on one rank."""
        return self.spec.kv_bytes(tokens, self.formats.kv_bytes, self.engine.tp)

    @property
    def _parameters(self) -> Parameters:
        if self.spec.parameters is None:
            raise ConfigError(f"{self.spec.architecture} does not say how many parameters it has: no cost can be told")
        return self.spec.parameters
