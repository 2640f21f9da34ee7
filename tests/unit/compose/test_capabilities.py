"""Capabilities and requirements: every conflict at once, in readable messages with alternatives."""

import sys
from types import ModuleType

import pytest

from dovetail.core.compose import Capabilities, Host, Requires
from dovetail.core.errors import CapabilityError, PluginError


@pytest.fixture
def stated(monkeypatch):
    """Register a capabilities function under a name that components can refer to."""
    module = ModuleType("stated_here")
    monkeypatch.setitem(sys.modules, "stated_here", module)

    def add(name, *, requires=(), lacks=(), **provides):
        stated = Capabilities(provides=provides, requires=tuple(requires), lacks=tuple(lacks))
        setattr(module, name, lambda config, host: stated)
        return f"stated_here:{name}"

    return add


@pytest.fixture
def world(stand_ins, make, stated):
    """A scheduler with several requirements, and alternatives of which some meet them."""
    page = Requires(kind="kv_cache", key="pages", contains=16, reason="its kernel reads 16 tokens at a time")
    device = Requires(kind="engine", key="device", allowed=("cuda",), reason="it runs on CUDA")
    hopper = Requires(kind="host", key="compute_capability", at_least=(9, 0), reason="it uses TMA")
    narrow = Requires(kind="model", key="head_dim", at_most=128, reason="it keeps a head in registers")
    lists = Requires(kind="logits", key="graph_safe", allowed=(True,), reason="it captures graphs")
    return stand_ins(
        make("scheduler", "picky", capabilities=stated("picky", requires=[page, device, hopper, narrow, lists])),
        make("scheduler", "easy", capabilities=stated("easy")),
        make("kv_cache", "coarse", capabilities=stated("coarse", pages=(64,))),
        make("kv_cache", "fine", capabilities=stated("fine", pages=(16, 32))),
        make("kv_cache", "fussy", capabilities=stated("fussy", pages=(16,), requires=[device])),
        make("logits", "safe", capabilities=stated("safe", graph_safe=True)),
        make("logits", "unsafe", capabilities=stated("unsafe", graph_safe=False)),
    )


def sentences(composed, world, *overrides, host=None, **facts):
    with pytest.raises(CapabilityError) as caught:
        composed("scheduler=picky", *overrides, registry=world).check(host or Host(), facts)
    return caught.value.conflicts


def test_every_conflict_at_once_with_what_would_work(composed, world):
    found = sentences(composed, world, "kv_cache=coarse", "logits=[safe,unsafe]", head_dim=256)
    assert found == (
        "scheduler=picky requires kv_cache with 16 among pages (its kernel reads 16 tokens at a time); kv_cache=coarse "
        "has (64,). Would work: kv_cache=fine, scheduler=easy, scheduler=fcfs, scheduler=static.",
        "scheduler=picky requires engine with device cuda (it runs on CUDA); engine has auto. "
        "Would work: engine.device=cuda, scheduler=easy, scheduler=fcfs, scheduler=static.",
        "scheduler=picky requires host with compute_capability at least (9, 0) (it uses TMA); this host has (0, 0). "
        "Would work: scheduler=easy, scheduler=fcfs, scheduler=static.",
        "scheduler=picky requires model with head_dim at most 128 (it keeps a head in registers); the checkpoint has "
        "256. Would work: scheduler=easy, scheduler=fcfs, scheduler=static.",
        "scheduler=picky requires logits with graph_safe true (it captures graphs); logits=unsafe has false. "
        "Would work: scheduler=easy, scheduler=fcfs, scheduler=static.",
    )


def test_an_option_that_would_only_move_the_conflict_is_not_offered(composed, world):
    (first, *_) = sentences(composed, world, "kv_cache=coarse")
    assert "kv_cache=fussy" not in first
    (first, *_) = sentences(composed, world, "kv_cache=coarse", "engine.device=cuda")
    assert "kv_cache=fussy" in first


def test_what_fits_raises_nothing(composed, world):
    hopper = Host(device="cuda", compute_capability=(9, 0))
    asked = ("scheduler=picky", "kv_cache=fine", "logits=[safe]", "engine.device=cuda")
    composed(*asked, registry=world).check(hopper, {"head_dim": 128})


def test_what_is_not_stated_is_not_assumed(composed, world):
    found = sentences(composed, world, "kv_cache=prefix_hash")
    assert "kv_cache=prefix_hash does not state it" in found[0]
    assert "model=tiny does not state it" in found[3]


def test_what_is_missing_here_is_told_and_not_offered(composed, stand_ins, make, stated):
    lacks = ["the package x: pip install x"]
    registry = stand_ins(
        make("kv_cache", "remote", capabilities=stated("remote", lacks=lacks)),
        make("kv_cache", "distant", capabilities=stated("distant", lacks=lacks)),
        make("logits", "far", capabilities=stated("far", lacks=["the library y"])),
    )
    with pytest.raises(CapabilityError) as caught:
        composed("kv_cache=remote", "logits=[far]", registry=registry).check(Host())
    cache, logits = sorted(caught.value.conflicts)
    assert cache.startswith("kv_cache=remote lacks the package x: pip install x. Would work: kv_cache=")
    assert "distant" not in cache
    assert logits == "logits.far=far lacks the library y. Would work: none."


def test_a_nested_part_demands_but_does_not_answer(composed, stand_ins, make, stated):
    demand = Requires(kind="scheduler", key="overlap", allowed=(True,), reason="it drafts ahead")
    registry = stand_ins(make("model", "eager", capabilities=stated("eager", requires=[demand], overlap=True)))
    found = composed("spec_decode=draft", "model@spec_decode.model=eager", registry=registry)
    with pytest.raises(CapabilityError, match="spec_decode.model=eager requires scheduler with overlap true"):
        found.check(Host())


def test_capabilities_follow_the_options(composed, stand_ins, make, monkeypatch):
    module = ModuleType("stated_by_option")
    module.scheduler = lambda config, host: Capabilities(provides={"chunks": config.max_chunk is not None})
    module.cache = lambda config, host: Capabilities(
        requires=(Requires(kind="scheduler", key="chunks", allowed=(True,), reason="it is small"),)
    )
    monkeypatch.setitem(sys.modules, "stated_by_option", module)
    from dovetail.core.compose import Registry

    base = stand_ins(make("kv_cache", "small", capabilities="stated_by_option:cache"))
    fcfs = base.registered["scheduler", "fcfs"]
    chunked = make("scheduler", "fcfs", fcfs.component.config, capabilities="stated_by_option:scheduler")
    others = [r for key, r in base.registered.items() if key != ("scheduler", "fcfs")]
    registry = Registry([*others, type(fcfs)(chunked, fcfs.package)], config_dirs=base.config_dirs)
    composed("kv_cache=small", "scheduler.max_chunk=4", registry=registry).check(Host())
    with pytest.raises(CapabilityError):
        composed("kv_cache=small", registry=registry).check(Host())


def test_a_function_that_fails_names_the_package(composed, stand_ins, make, stated, monkeypatch):
    registry = stand_ins(make("kv_cache", "odd", capabilities="stated_nowhere:x"))
    with pytest.raises(PluginError, match="package home 1.0: kv_cache=odd needs stated_nowhere:x, which does not load"):
        composed("kv_cache=odd", registry=registry).check(Host())


def test_a_demand_has_one_bound():
    with pytest.raises(ValueError, match="give exactly one"):
        Requires(kind="engine", key="tp", reason="", at_least=1, at_most=2)


def test_a_flag_is_not_a_count():
    assert not Requires(kind="engine", key="tp", reason="", allowed=(1,)).admits(True)
