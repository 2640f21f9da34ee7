"""Cost contract: predicts how long a step takes, for scheduler, simulator, planner and adaptive drafting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces.plan import SAMPLE

if TYPE_CHECKING:
    from dovetail.core.compose import EngineConfig
    from dovetail.core.interfaces.model import ModelSpec, Parameters
    from dovetail.core.interfaces.plan import Row, StepPlan


@dataclass(frozen=True, slots=True)
class Formats:
    """Number formats of a composition that determine time and memory."""

    dtype: str
    """Dtype of activations, attention and unquantized weights: "bfloat16", "float16" or "float32"."""
    dtype_bytes: int
    weight_bits: float
    """Bits per weight of a linear layer, its share of the scales included."""
    product: str
    """Number format of the matmuls in linear layers: `dtype`, "fp8", "int8" or "fp4"."""
    kv_bytes: int
    """Bytes per cached value."""
    head_bits: float | None = None
    """Bits per weight of the matrix of logits, also if the embedding is tied to it; None = those of `dtype`."""
    head_product: str | None = None
    """Number format of the matmul of logits; None = `dtype`."""
    embedding_bits: float | None = None
    """Bits per weight of an embedding that is not tied; None = those of `dtype`."""
    expert_bits: float | None = None
    """Bits per weight of routed experts; None = `weight_bits`."""
    rounds: bool = True
    """Whether matmuls of many rows in fp8 round weights of fewer bits to fp8 first; False = they decode them."""
    copy_bits: float = 0.0
    """Bits per weight of the rounded weights, if these stay in memory; routed experts have none."""

    def head_bytes(self, p: Parameters) -> float:
        """Return the bytes of the matrix of logits, over all ranks."""
        bits = 8 * self.dtype_bytes if self.head_bits is None else self.head_bits
        return (p.head or p.embedding) * bits / 8

    def embedding_bytes(self, p: Parameters) -> float:
        """Return the bytes of the embedding, over all ranks; 0 if it is tied to the matrix of logits."""
        bits = 8 * self.dtype_bytes if self.embedding_bits is None else self.embedding_bits
        return p.embedding * bits / 8 if p.head else 0.0

    def layer_bytes(self, p: Parameters, experts: float) -> float:
        """Return the bytes of the matrices of layers with so many weights in routed experts, over all ranks."""
        return (p.attention + p.mlp) * self.weight_bits / 8 + self.expert_bytes(experts)

    def expert_bytes(self, weights: float) -> float:
        """Return the bytes of so many weights of routed experts."""
        return weights * (self.weight_bits if self.expert_bits is None else self.expert_bits) / 8

    def weight_bytes(self, p: Parameters) -> float:
        """Return the bytes of all weights in memory, over all ranks."""
        layers = self.layer_bytes(p, p.experts) + (p.attention + p.mlp) * self.copy_bits / 8
        return layers + self.head_bytes(p) + self.embedding_bytes(p) + p.rest * self.dtype_bytes


class RowWork(NamedTuple):
    """One row of a step, real or hypothetical."""

    tokens: int
    """Tokens fed."""
    bound: int
    """KV length after the step."""
    sampled: int = 1
    """Positions whose logits are computed."""
    times: int = 1
    """Number of identical rows."""

    @classmethod
    def of(cls, row: Row) -> RowWork:
        return cls(row.count, row.bound, row.draft + 1 if row.flags & SAMPLE else 0)


OVERLAP = 3.0
"""Exponent of the norm that joins reads of weights and matmuls. Infinity is a perfect overlap, their maximum; 1 is
none, their sum. Three models on an H100 have 2.3 to 3 (benchmarks/NOTES.md)."""


class StepTerms(NamedTuple):
    """Seconds of the parts of a step, which a calibration scales one by one."""

    weights: float = 0.0
    """Reads of the weights."""
    products: float = 0.0
    """Arithmetic of matmuls. It overlaps with the reads of weights, but not entirely where both take long."""
    prefill: float = 0.0
    """Attention of prompt chunks."""
    decode: float = 0.0
    """Attention of decode rows."""
    collectives: float = 0.0
    """Exchange between ranks."""
    launches: float = 0.0
    """Time that depends on the number of kernels alone."""
    sampling: float = 0.0
    """Draws from the logits."""

    @property
    def seconds(self) -> float:
        """Time of the step."""
        weights, products, *rest = self
        return float((weights**OVERLAP + products**OVERLAP) ** (1 / OVERLAP)) + sum(rest)

    def scaled(self, factors: StepTerms) -> StepTerms:
        return StepTerms(*map(mul, self, factors))


class CostModel(ABC):
    """Built as `Class(config)`, then bound to a model; all other methods are valid only after `bind`. They are pure and
    cheap, and use neither torch nor a device, so planner and simulator can call them.

    Seconds are measured from a step's start to its end. With pipeline parallelism other steps run concurrently.
    """

    predicts = True
    """False = the cost model is off: it is never called, and the scheduler's context has none."""

    drafter: CostModel | None = None
    """Cost model of the model inside the drafter, bound to that one; None = the drafter has none. Written by the engine
    after `bind`."""

    drafts_in_one_pass = False
    """DrafterFacts.one_pass. Written by the engine together with `drafter`."""

    draft_window: int | None = None
    """Drafter.window: tokens of a row that the first pass of a proposal feeds. Written by the engine together with
    `drafter`. None = each pass feeds one."""

    def __init__(self, config: object) -> None:
        self.config = config

    def bind(self, spec: ModelSpec, engine: EngineConfig, formats: Formats) -> None:
        """Take the model and its parallel layout. Called once. Raises ConfigError for a model it cannot predict."""
        self.spec, self.engine, self.formats = spec, engine, formats

    @abstractmethod
    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        """Device time of a step with these rows; 0.0 for no rows."""

    def seconds(self, plan: StepPlan) -> float:
        """Device time of the plan."""
        return self.step_seconds(self.works(plan.rows))

    def launch_seconds(self, plan: StepPlan) -> float:
        """Host time from the start of the decision on a plan until the plan is launched. executor=simulated adds it in
        virtual time. Default 0.0: the host takes no time."""
        return 0.0

    def works(self, rows: Iterable[Row]) -> Iterable[RowWork]:
        """Return the work of a plan's rows. A model may add up rows whose sum it needs alone."""
        return map(RowWork.of, rows)

    def terms(self, rows: Iterable[RowWork]) -> StepTerms | None:
        """The parts of a step with these rows, whose `seconds` are those of `step_seconds`; None = the model has no
        such parts and cannot be calibrated."""
        return None

    def lanes_seconds(self, lanes: Sequence[Sequence[RowWork]]) -> float:
        """Device time of a step that lanes (EngineConfig.lanes) run together, from the rows of each: that of the
        slowest lane. All other methods take the rows of one lane, and predict for lanes that all have as many."""
        found = self.lanes_terms(lanes)
        return max(map(self.step_seconds, lanes)) if found is None else max(terms.seconds for terms in found)

    def lanes_terms(self, lanes: Sequence[Sequence[RowWork]]) -> Sequence[StepTerms] | None:
        """The parts of such a step for each lane: experts get the rows of all lanes. None, the default = the model has
        no such parts, and each lane counts as if the others had its rows."""
        return None

    @property
    def memory(self) -> float | None:
        """Memory of one device, GB (10^9 bytes); None = unknown. Default: the option `memory`, if there is one."""
        found: float | None = getattr(self.config, "memory", None)
        return found

    def check_device(self, device: str) -> None:
        """Raise ConfigError if predictions are for another device than `device`: a GPU's name, or "cpu". Called after
        `bind`, before a device is used; not called if the device is simulated."""

    def draft_seconds(self, rows: int, drafts: int, context: int) -> float:
        """Device time of drafting `drafts` tokens for each of `rows` sequences of length `context`, before the step
        that verifies them. Default: the passes of the model inside the drafter, of which the first feeds
        `draft_window` tokens; 0.0 for a drafter without a model."""
        if self.drafter is None or not rows or not drafts:
            return 0.0
        if self.drafts_in_one_pass:
            return self.drafter.decode_seconds(rows, context)
        first = self.drafter.step_seconds([RowWork(self.draft_window or 1, context, 1, rows)])
        return first + (drafts - 1) * self.drafter.decode_seconds(rows, context)

    def follow_seconds(self, rows: Iterable[RowWork]) -> float:
        """Device time of feeding chunks of prompts to the layers of a drafter with a window (Drafter.window), in the
        step that feeds them to the model. Default: a step of the model inside the drafter, without logits."""
        if self.drafter is None:
            return 0.0
        return self.drafter.step_seconds(row._replace(sampled=0) for row in rows)

    def catch_up_seconds(self, rows: Iterable[RowWork]) -> float:
        """Time of feeding earlier tokens of rows to these layers (StepPlan.catch_up). The host launches them without a
        CUDA graph while the device runs them, which takes few tokens longer."""
        seconds = self.follow_seconds(rows)
        return max(seconds, self.drafter.eager_seconds) if seconds and self.drafter is not None else seconds

    @property
    def eager_seconds(self) -> float:
        """Time in which the host launches the layers of a step without a CUDA graph. Default: 0.0."""
        return 0.0

    def decode_seconds(self, batch: int, context: int) -> float:
        """Time per output token: a step that feeds one token to each of `batch` sequences of length `context`."""
        return self.step_seconds([RowWork(1, context, times=batch)])

    def prefill_seconds(self, tokens: int, cached: int = 0, chunk: int | None = None) -> float:
        """Time to feed `tokens` prompt tokens after `cached` ones, with no other rows, in steps of at most `chunk`
        tokens (default: engine.token_budget)."""
        chunk, end = chunk or self.engine.token_budget, cached + tokens
        bounds = [*range(cached + chunk, end, chunk), end]
        return sum(
            self.step_seconds([RowWork(bound - start, bound, int(bound == end))])
            for start, bound in zip([cached, *bounds], bounds, strict=False)
        )

    # Bytes follow from shapes and formats alone. They are here so that one component predicts time and memory.

    def weight_bytes(self) -> float:
        """Bytes of all weights, over the ranks of a replica. Lanes (EngineConfig.lanes) each have a share of the routed
        experts."""
        p = self._parameters
        elsewhere = p.experts * (1 - 1 / self.engine.lanes)
        return self.formats.weight_bytes(p) - self.formats.expert_bytes(elsewhere)

    def step_weight_bytes(self, tokens: int | None = None) -> float:
        """Bytes of the weights that a step of `tokens` tokens reads, over the ranks of a replica: all except the
        embedding table and the routed experts that no token selects, assuming random routing, and as many tokens in
        each lane. None = all experts."""
        return self._read_bytes(tokens)

    def _read_bytes(self, tokens: float | None) -> float:
        """`step_weight_bytes`; `tokens` is the mean over lanes."""
        p, lanes = self._parameters, self.engine.lanes
        experts = p.experts / lanes
        if tokens is not None and p.experts:
            experts *= 1 - (1 - p.active_experts / p.experts) ** (tokens * lanes)
        return self.formats.layer_bytes(p, experts) + self.formats.head_bytes(p) + p.rest * self.formats.dtype_bytes

    def kv_bytes(self, tokens: int) -> int:
        """KV cache bytes of a sequence of `tokens` tokens, on one rank."""
        return self.spec.kv_bytes(tokens, self.formats.kv_bytes, self.engine.tp)

    @property
    def _parameters(self) -> Parameters:
        if self.spec.parameters is None:
            raise ConfigError(
                f"{self.spec.architecture} does not state its number of parameters: its cost cannot be predicted"
            )
        return self.spec.parameters
