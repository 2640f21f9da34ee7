"""Requirements of the built-in executors."""

from __future__ import annotations

from dovetail.core.compose import Capabilities, Host, Requires
from dovetail.plugins.executor.config import InprocConfig, MultiprocConfig, SimulatedConfig

_PIPELINE = "no built-in executor splits layers over ranks yet"
_LANES = "it runs one replica; LLM, app=generate, app=bench and app=serve start engine.dp of them"


def inproc(config: InprocConfig, host: Host) -> Capabilities:
    return Capabilities(
        provides={"processes": "one", "adapters": True},
        requires=(
            Requires(kind="engine", key="tp", allowed=(1,), reason="it runs one rank; executor=multiproc runs more"),
            Requires(kind="engine", key="pp", allowed=(1,), reason=_PIPELINE),
            Requires(kind="engine", key="dp", allowed=(1,), reason=_LANES),
        ),
    )


def multiproc(config: MultiprocConfig, host: Host) -> Capabilities:
    return Capabilities(
        provides={"processes": "many", "adapters": True},
        requires=(
            Requires(
                kind="host",
                key="platform",
                allowed=("linux", "darwin"),
                reason="workers inherit shared memory and a socket as file descriptors",
            ),
            Requires(kind="engine", key="pp", allowed=(1,), reason=_PIPELINE),
            Requires(kind="engine", key="dp", allowed=(1,), reason=_LANES),
        ),
    )


def simulated(config: SimulatedConfig, host: Host) -> Capabilities:
    return Capabilities(
        provides={"processes": "one", "holds_weights": False},
        requires=(
            Requires(kind="spec_decode", key="drafts", allowed=(False,), reason="it has no model that verifies drafts"),
            Requires(kind="engine", key="pp", allowed=(1,), reason=_PIPELINE),
            Requires(kind="engine", key="dp", allowed=(1,), reason=_LANES),
        ),
    )
