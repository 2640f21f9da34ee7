"""Options of the app `bench`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dovetail.core.compose import ENGINE_NODES, AppConfig, Config


class SLOConfig(Config):
    """Limits that a request must meet to count for goodput."""

    ttft: float | None = Field(None, gt=0)
    """Maximum time to first token, seconds."""
    tpot: float | None = Field(None, gt=0)
    """Maximum mean time per output token after the first, seconds."""
    share: float = Field(0.9, gt=0, le=1)
    """Share of requests that must meet the limits for a rate to count as served (knee of the load curve)."""


class RunsConfig(AppConfig):
    """Options shared by the apps that measure runs of a workload."""

    runs: int = Field(1, ge=1)
    """Repeats, each with different prompts; results show the median and the range."""
    warmup: int = Field(64, ge=0)
    """Requests of the workload that run before the measurement, with at most 4 output tokens each; 0 = none."""
    adapters: tuple[str, ...] = ()
    """Names of adapters to which requests are assigned at random; "" is the base model. A server serves them as models.
    Empty: as the workload specifies."""
    adapter_skew: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The k-th adapter gets a share of requests proportional to 1 / k^skew: 0 = uniform, 1 = Zipf's law."""
    slo: SLOConfig = SLOConfig()
    """Limits for goodput; all unset: goodput is not reported."""


class BenchConfig(RunsConfig):
    """Measure latency, throughput and goodput of a workload, on this engine or on a server with the OpenAI API."""

    needs: ClassVar[tuple[str, ...]] = (*ENGINE_NODES, "workload")

    workloads: tuple[str, ...] = ()
    """Names of workloads to run one after another in one start of the engine; empty: the one of workload=."""
    one_token_run: bool = True
    """If all requests arrive at once and have equal output lengths, also run them with one output token. The time per
    output token of the run is the difference of both run times / (output tokens of a request - 1)."""
    url: str | None = None
    """Measure the server at this address, which ends with /v1, instead of the engine. model=... then only sets the
    vocabulary and the tokenizer."""
    model: str | None = None
    """Model name to request from the server; null: the first that it lists."""
    send: Literal["ids", "text"] = "ids"
    """Form in which prompts are sent to a server: token ids, or their text, which it may tokenize differently."""
    timeout: float = Field(600.0, gt=0)
    """Time limit of one request to a server, seconds."""
    out: str | None = None
    """Write all figures to this JSON file."""
    calibrate: str | None = None
    """Fit the cost model to the measured steps and write the calibration to this new JSON file, for cost=measured.
    cost= chooses the model that is fitted, such as h200. Needs the extra `bench`."""
    hold_out: tuple[str, ...] = ()
    """Workloads whose steps are not fitted, so that they can test the calibration."""
    plot: str | None = None
    """Plot latency distributions or the load curve to this file (png, svg or pdf). Needs the extra `bench`."""
