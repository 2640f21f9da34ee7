"""Another process gets the composition that this one has, whatever was installed or removed in between."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.compose import compose, discover
from dovetail.core.errors import ConfigError
from dovetail.core.parallel.process import order_for, recompose

WORDS = ["+preset=tiny_cpu", "app=serve"]
PARSER = """
from dovetail import Component, Config, hookimpl

@hookimpl
def dovetail_components():
    return [Component(kind="tool_parser", name="acme", config=Config, target="json:JSONDecoder", api="tool_parser/0.1")]
"""


def remove(package: Path) -> None:
    for folder in package.parent.glob(f"{package.name}*"):
        shutil.rmtree(folder)


def order(*words: str) -> dict[str, Any]:
    return order_for(compose([*WORDS, *words], registry=discover()))


def test_a_plugin_installed_later_is_not_seen(install: Callable[..., Path], plugin: Callable[..., str]) -> None:
    sent = order()
    install("acme_new", plugin())
    install("acme_parser", PARSER)
    install("acme_clash", plugin("fcfs"))
    assert ("scheduler", "swift") in discover().registered
    found = recompose(sent)
    assert ("scheduler", "swift") not in found.registry.registered
    assert order_for(found) == sent, "a process passes on what it got"


def test_a_plugin_that_is_not_in_use_may_be_removed(install: Callable[..., Path], plugin: Callable[..., str]) -> None:
    packages = install("acme_gone", plugin()), install("acme_parser", PARSER)
    sent = order()
    for package in packages:
        remove(package)
    # What this process has imported would still load.
    assert recompose({**sent, "sources": [one for one in sent["sources"] if "acme" not in one[0]]}).app == "serve"
    assert recompose(sent).app == "serve"


def test_a_plugin_in_use_that_was_removed_or_replaced_is_named(
    install: Callable[..., Path], plugin: Callable[..., str]
) -> None:
    package = install("acme_used", plugin())
    sent = order("scheduler=swift")
    assert recompose(sent).part("scheduler").package.name == "acme_used"
    remove(package)
    with pytest.raises(ConfigError, match="package acme_used 1.0 is in use, and it is not installed any more"):
        recompose(sent)
    install("acme_used", plugin(), version="1.1")
    with pytest.raises(ConfigError, match="acme_used was version 1.0 at the start of this run and is 1.1 now"):
        recompose(sent)
