"""Options of the app `bench`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dovetail.core.compose import ENGINE_NODES, AppConfig, Config


class SLOConfig(Config):
    """What a request must keep to count for goodput."""

    ttft: float | None = Field(None, gt=0)
    """Time to first token at most, seconds."""
    tpot: float | None = Field(None, gt=0)
    """Time per output token after the first at most, seconds."""
    share: float = Field(0.9, gt=0, le=1)
    """Of the requests that must keep it for a rate to count as served (the knee of a load curve)."""


class RunsConfig(AppConfig):
    """What every app that measures runs of a workload can be told."""

    runs: int = Field(1, ge=1)
    """Repeats, each with prompts of its own; results show the median and the range."""
    warmup: int = Field(64, ge=0)
    """Requests of the workload that run before anything is measured, for 4 output tokens; 0 = none."""
    adapters: tuple[str, ...] = ()
    """Names of adapters, over which requests are spread at random; "" is the base model. A server knows them as models.
    Empty: as the workload says."""
    adapter_skew: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The k-th of them gets a share in proportion to 1 / k^skew: 0 = all alike, 1 = Zipf's law."""
    slo: SLOConfig = SLOConfig()
    """What counts for goodput; all unset: no goodput."""


class BenchConfig(RunsConfig):
    """Measure a workload on this engine or on a server that speaks the OpenAI API: latencies, throughput, goodput."""

    needs: ClassVar[tuple[str, ...]] = (*ENGINE_NODES, "workload")

    workloads: tuple[str, ...] = ()
    """Several workloads by name, one after another in one start of the engine; empty: that of workload=."""
    one_token_run: bool = True
    """Where all requests arrive at once and are equally long, run them for one output token too: the time per output
    token of the run is what is left of its time, divided by the output tokens of a request less one."""
    url: str | None = None
    """Measure this server in place of the engine: its address up to and with /v1. The model (model=...) then only says
    which token ids there are."""
    model: str | None = None
    """The model's name at the server; null: the first that it lists."""
    send: Literal["ids", "text"] = "ids"
    """What a server is given as prompts: token ids, or their text (which it may cut into other tokens)."""
    timeout: float = Field(600.0, gt=0)
    """Of one request at a server, seconds."""
    out: str | None = None
    """Write all figures to this JSON file."""
    plot: str | None = None
    """Draw distributions, or the load curve, to this file (png, svg or pdf). Needs the extra `bench`."""
