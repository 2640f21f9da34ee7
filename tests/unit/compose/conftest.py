"""A registry of stand-ins with the names of conf/config.yaml, and fake installed packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field

from dovetail.core.compose import (
    KINDS,
    AppConfig,
    Component,
    Composition,
    Config,
    Package,
    Part,
    Parts,
    Registered,
    Registry,
    Selected,
    compose,
)

ENGINE_NODES = ("engine", "model", "scheduler", "kv_cache", "spec_decode", "logits", "observer")


class GenerateConfig(AppConfig):
    needs: ClassVar = ENGINE_NODES
    takes_prompts: ClassVar = True
    max_tokens: int = Field(16, ge=1)
    """Tokens to generate."""


class ServeConfig(AppConfig):
    needs: ClassVar = (*ENGINE_NODES, "tool_parser")
    port: int = 8000
    """TCP port."""


class ListConfig(AppConfig):
    words: str = ""
    """Anything."""


class Empty(Config):
    pass


class TinyConfig(Config):
    layers: int = 2
    """Layers."""


class SchedulerConfig(Config):
    max_chunk: int | None = Field(None, ge=1)
    """Tokens."""
    order: Literal["arrival", "length"] = "arrival"
    """Order of requests."""


class RadixConfig(Config):
    hosts: int = 0
    """Number of host pages."""
    share: float = 0.5
    """Fraction of pages."""


class DraftConfig(Config):
    model: Selected = Part("model", default="tiny")
    observers: dict[str, Selected] = Parts("observer", default=["log", "trace"])
    length: int = 4
    """Number of tokens proposed per step."""


class PenaltyConfig(Config):
    scale: float = 1.0
    """Factor."""


class ObserverConfig(Config):
    every: int = 1
    """Steps."""


def component(kind: str, name: str, config: type[Config] = Empty, **more: Any) -> Component:
    more = {"target": "nowhere:Nothing", "api": KINDS[kind].api, **more}
    return Component(kind=kind, name=name, config=config, **more)


STAND_INS = (
    component("app", "generate", GenerateConfig),
    component("app", "serve", ServeConfig),
    component("app", "list", ListConfig),
    component("model", "tiny", TinyConfig),
    component("model", "small", TinyConfig),
    component("scheduler", "fcfs", SchedulerConfig, renamed={"chunk": "max_chunk"}),
    component("scheduler", "static"),
    component("kv_cache", "prefix_hash"),
    component("kv_cache", "radix", RadixConfig),
    component("attention", "sdpa"),
    component("quant", "none"),
    component("spec_decode", "none"),
    component("spec_decode", "draft", DraftConfig),
    component("executor", "inproc"),
    component("collective", "nccl"),
    component("logits", "penalties", PenaltyConfig),
    component("logits", "logit_bias"),
    component("logits", "min_tokens", PenaltyConfig),
    component("observer", "log", ObserverConfig),
    component("observer", "trace", ObserverConfig),
    component("tool_parser", "hermes", PenaltyConfig),
)
HOME = Package("home", "1.0")
CONF = {
    "config.yaml": """
        defaults:
          - engine
          - app: generate
          - model: tiny
          - scheduler: fcfs
          - kv_cache: prefix_hash
          - spec_decode: none
          - cost: null
          - logits: [penalties, logit_bias, min_tokens]
          - observer: []
          - tool_parser: []
          - _self_
    """,
    "preset/tiny_cpu.yaml": """
        # @package _global_
        defaults:
          - override /model: tiny
    """,
}

Compose = Callable[..., Composition]


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry]:
    """Return a registry of the stand-ins and the given components, with a primary config that selects the stand-ins."""
    home = tmp_path / "home_conf"
    for name, text in CONF.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(dedent(text).lstrip())
    monkeypatch.syspath_prepend(str(tmp_path))
    folders = [(HOME, "pkg://home_conf")]
    return lambda *more: Registry([Registered(c, HOME) for c in (*STAND_INS, *more)], config_dirs=folders)


@pytest.fixture
def make() -> Callable[..., Component]:
    return component


@pytest.fixture
def registry(stand_ins: Callable[..., Registry]) -> Registry:
    return stand_ins()


@pytest.fixture
def composed(registry: Registry) -> Compose:
    return lambda *overrides, **more: compose(overrides, **{"registry": registry, **more})


@pytest.fixture
def conf(tmp_path: Path) -> Callable[[str, str], str]:
    """Write a file into a user's config folder and return the folder."""

    def write(path: str, text: str) -> str:
        file = tmp_path / "own_conf" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text).lstrip())
        return str(tmp_path / "own_conf")

    return write


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Put a fake distribution on sys.path: a package with `source` as its __init__, and its dist-info."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    before = set(sys.modules)

    def add(name: str, source: str, version: str = "1.0") -> Path:
        package = site / name
        package.mkdir()
        (package / "__init__.py").write_text(dedent(source))
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[dovetail]\nmain = {name}\n")
        importlib.invalidate_caches()
        return package

    yield add
    for module in set(sys.modules) - before:
        if str(site) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]


PLUGIN = """
from dovetail import Component, Config, hookimpl

class C(Config):
    size: int = 3

@hookimpl
def dovetail_components():
    return [Component(kind="scheduler", name="{name}", config=C, target="{target}", api="{api}")]
"""


@pytest.fixture
def plugin() -> Callable[..., str]:
    """Return the source of a package with one scheduler."""
    return lambda name="swift", target="json:JSONDecoder", api=KINDS["scheduler"].api: PLUGIN.format(
        name=name, target=target, api=api
    )
