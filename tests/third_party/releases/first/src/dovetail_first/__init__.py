"""A package written for the first contracts. It does not change any more: contracts that have not changed run it, and
the others refuse it in words."""

from pydantic import Field

from dovetail import Component, Config, hookimpl


class FirstConfig(Config):
    """Options of every component."""

    most: int = Field(4, ge=1)
    """Number of requests."""


KINDS = {
    "attention": "Changed",
    "cost": "FirstCost",
    "grammar": "Changed",
    "logits": "Changed",
    "model": "Changed",
    "observer": "FirstObserver",
    "quant": "Changed",
    "router": "FirstRouter",
    "scheduler": "FirstScheduler",
    "spec_decode": "Changed",
    "workload": "FirstWorkload",
}


@hookimpl
def dovetail_components():
    return [
        Component(
            kind=kind, name="first", config=FirstConfig, target=f"dovetail_first.parts:{target}", api=f"{kind}/0.1"
        )
        for kind, target in KINDS.items()
    ]
