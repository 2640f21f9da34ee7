"""Requirements of the built-in executors."""

from __future__ import annotations

from dovetail.core.compose import Capabilities, Host, Requires
from dovetail.plugins.executor.config import InprocConfig, MultiprocConfig, SimulatedConfig

_DESCRIPTORS = "workers inherit shared memory and a socket as file descriptors"
_REPLICAS = "it runs one replica; LLM, app=generate, app=bench and app=serve start engine.dp of them"
_ONE_PIPELINE = (
    Requires(kind="engine", key="pp", allowed=(1,), reason="no built-in executor splits layers over ranks yet"),
    Requires(kind="engine", key="dp", allowed=(1,), reason=_REPLICAS),
)

_NO_DRAFTS = Requires(
    kind="spec_decode",
    key="drafts",
    allowed=(False,),
    reason="it has no model that verifies drafts (executor.acceptance=<0..1> makes up how many are accepted)",
)


def inproc(config: InprocConfig, host: Host) -> Capabilities:
    return Capabilities(
        provides={"processes": "one", "adapters": True, "lanes": config.delay == 0},
        requires=(
            Requires(kind="engine", key="tp", allowed=(1,), reason="it runs one rank; executor=multiproc runs more"),
            *_ONE_PIPELINE,
        ),
    )


def multiproc(config: MultiprocConfig, host: Host) -> Capabilities:
    return Capabilities(
        provides={"processes": "many", "adapters": True, "lanes": True},
        requires=(
            Requires(kind="host", key="platform", allowed=("linux", "darwin"), reason=_DESCRIPTORS),
            *_ONE_PIPELINE,
        ),
    )


def simulated(config: SimulatedConfig, host: Host) -> Capabilities:
    return Capabilities(
        # Lanes share a device, which only virtual time lets one process simulate.
        provides={
            "processes": "one",
            "holds_weights": False,
            "clock": config.clock,
            "lanes": config.clock == "virtual",
        },
        requires=_ONE_PIPELINE if config.acceptance is not None else (_NO_DRAFTS, *_ONE_PIPELINE),
    )
