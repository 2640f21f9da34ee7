"""Broken on purpose."""

from dovetail import Component, Config


class Options(Config):
    """None."""


def component(kind: str, name: str, api: str) -> Component:
    return Component(kind=kind, name=name, config=Options, target="dovetail_wreck.nowhere:Nothing", api=api)
