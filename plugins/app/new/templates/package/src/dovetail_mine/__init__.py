"""Hooks of the package, which Dovetail calls when it composes. Nothing heavy is imported here."""

from dovetail import Component, hookimpl

from dovetail_mine.config import MineConfig


@hookimpl
def dovetail_components():
    return [
        Component(
            kind="KIND",
            name="mine",
            config=MineConfig,
            target="dovetail_mine.KIND:Mine",
            capabilities="dovetail_mine.capabilities:capabilities",
            contract="dovetail_mine.contract:MineContract",
            api="KIND/API",
        )
    ]


@hookimpl
def dovetail_config_dirs():
    return ["pkg://dovetail_mine.conf"]
