"""Options of the app `ablate`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dovetail.core.compose import ENGINE_NODES, Config
from dovetail.plugins.app.bench.config import RunsConfig

Value = bool | int | float | str | None
Values = Annotated[tuple[Value, ...], Field(min_length=1)]
Design = Literal["grid", "one_at_a_time"]


class QualityConfig(Config):
    """Quality check: answers of each variant, generated apart from the timed runs, are compared with the baseline's."""

    prompts: int = Field(8, ge=0)
    """Number of prompts, cut from the ends of workload prompts; 0: no quality check."""
    prompt_tokens: int = Field(128, ge=1)
    """Maximum length of each prompt, tokens."""
    tokens: int = Field(64, ge=2)
    """Tokens generated from each prompt."""
    text: str | None = None
    """UTF-8 text file. Log-likelihoods are computed on `prompts` windows of this text, each `prompt_tokens` + `tokens`
    long, instead of on text sampled by the first variant. Needs a model with a tokenizer."""


Primary = Literal[
    "output_tokens_per_s",
    "ttft_ms.median",
    "ttft_ms.p95",
    "tpot_ms.median",
    "itl_ms.p99",
    "goodput.requests_per_s",
    "prefix_hit_rate",
    "acceptance_length",
    "kv_waste",
    "startup_s",
]


class GateConfig(Config):
    """Limits for the answers of a variant, compared with its baseline's. null = no limit."""

    nll_change: float | None = Field(None, allow_inf_nan=False)
    """Greatest change of the negative log-likelihood, nats/token; the whole interval must be below it."""
    greedy_tokens_equal: float | None = Field(None, ge=0, le=1)
    """Least share of greedy tokens before the first difference."""
    top1_agreement: float | None = Field(None, ge=0, le=1)
    """Least share of positions with the same most likely token."""

    @property
    def limits(self) -> bool:
        return any(value is not None for value in (self.nll_change, self.greedy_tokens_equal, self.top1_agreement))


class VoidConfig(Config):
    """Conditions under which a round does not count. They are fixed before the first start."""

    throttled: bool = True
    """A GPU was slowed down for its temperature or by a power brake."""
    gpu_processes: bool = True
    """Another process used a GPU."""
    clock: float | None = Field(None, gt=0, le=1)
    """Least clock of a busy GPU, as a share of its maximum; null = no limit."""
    foreign_cpu: float | None = Field(None, ge=0, le=1)
    """Greatest share of this machine's processors that other processes may use; null = no limit."""


class AblateConfig(RunsConfig):
    """Swap parts and measure what each one changes: same requests for all, ratios with confidence intervals."""

    needs: ClassVar[tuple[str, ...]] = (*ENGINE_NODES, "workload")

    vary: dict[str, Values] = Field(default_factory=dict)
    """Kind or dotted option -> values to try: {kv_cache: [paged, radix], engine.page_size: [16, 32]}. The baseline is
    the given composition."""
    design: Design = "grid"
    """grid: every combination of values. one_at_a_time: the baseline with one value changed."""
    arms: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """Named variants, instead of `vary`: name -> overrides added to the given composition, for options that change
    together. The baseline is the given composition."""
    ladder: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Ordered steps, instead of `vary`: name -> overrides added to the previous step. Each step is compared with the
    previous and with the first one. `app=ladder` is the built-in ladder."""
    across: dict[str, Values] = Field(default_factory=dict)
    """Kind or dotted option -> values under each of which everything is compared: {workload.burstiness: [1.0, 0.2]}.
    Each combination is a block with a baseline and requests of its own; variants are compared only within a block."""
    rounds: int = Field(5, ge=1)
    """Starts of each variant, each in a new process. Every round starts all variants once, in a different order."""
    runs: int = Field(2, ge=1)
    """Runs of the workload per start. Intervals are computed over rounds; more runs make each round more precise."""
    primary: Primary = "output_tokens_per_s"
    """The figure that decides, named before anything is measured. Its p values are corrected for the number of
    comparisons (Holm); all other figures are exploratory."""
    quality: QualityConfig = QualityConfig()
    """How the answers of the variants are compared."""
    gate: GateConfig = GateConfig()
    """Limits for the answers; a variant outside them is reported as wrong, however fast it is."""
    void: VoidConfig = VoidConfig()
    """When a round does not count."""
    out: str | None = None
    """JSON file for all runs and comparisons, rewritten after each start."""
    resume: bool = False
    """Continue the ablation in `out`: starts that it has are not repeated, and failed variants are tried again. Parts,
    options, versions and machine must be the same; `rounds` may be greater."""
    report: str | None = None
    """Report of one HTML file: sentences, tables, bars, Pareto plot, compositions, versions and seeds."""
    plot: str | None = None
    """Plot of the ratios with their intervals, for a ladder also of the cumulative ratio (png, svg or pdf). Needs the
    extra `bench`."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        given = [name for name in ("vary", "arms", "ladder") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each define the variants: give one of them")
        if both := [key for key in self.across if key in self.vary]:
            raise ValueError(f"`{both[0]}` is in vary and in across: give it once")
        if self.resume and self.out is None:
            raise ValueError("resume continues the ablation in `out`: set ablate.out")
        if self.gate.limits and not self.quality.prompts:
            raise ValueError("gate judges answers, and quality.prompts=0 asks for none")
        return self
