"""The suite of an installed component, by name."""

from __future__ import annotations

import importlib

import pytest

from dovetail.core.compose import KINDS
from dovetail.core.errors import ConfigError
from dovetail.core.testing.suites import suite_of


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_names_its_suite(kind: str) -> None:
    module, _, name = KINDS[kind].suite.partition(":")
    assert name.endswith("Contract") and isinstance(getattr(importlib.import_module(module), name), type)


def test_a_suite_builds_the_class_with_default_options() -> None:
    suite = suite_of("router", "round_robin")()
    suite.test_it_chooses_an_available_replica()
    assert suite.make(3).replicas == 3


@pytest.mark.parametrize(
    ("component", "reason"),
    [
        ("logits/penalties", "LogitsProcessorContract needs `active_params`: define it in a subclass of"),
        ("workload/trace", "path is required, so it cannot be built with default options: define `make`"),
        ("scheduler/none_such", "no such scheduler"),
    ],
)
def test_what_needs_more_says_so(component: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        suite_of(*component.split("/"))
