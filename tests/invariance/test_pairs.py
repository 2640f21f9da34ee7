"""Every pair of choices occurs in some composition, and each composition gives the reference's tokens."""

from __future__ import annotations

import os

import pytest

from dovetail import Generation

from .grid import AXES, flatten, pairwise
from .test_same_tokens import PARAMS, REFERENCE, outputs, run

pytestmark = pytest.mark.nightly

SHORT = [params.model_copy(update={"max_tokens": params.max_tokens // 2}) for params in PARAMS]
EVERY = [flatten(choice) for choice in pairwise()]
COMPOSITIONS = EVERY if os.environ.get("DOVETAIL_GRID") == "pairs" else EVERY[::15]
"""A fifteenth of them with DOVETAIL_NIGHTLY=1; all of them with DOVETAIL_GRID=pairs, too. Both are in .ci/nightly."""


@pytest.fixture(scope="module")
def reference() -> list[Generation]:
    return run(*REFERENCE, params=SHORT)


@pytest.mark.parametrize("overrides", COMPOSITIONS, ids=" ".join)
def test_a_composition_gives_the_same_tokens(reference: list[Generation], overrides: list[str]) -> None:
    assert [outputs(g) for g in run(*overrides, params=SHORT)] == [outputs(g) for g in reference]


def test_every_built_in_takes_part() -> None:
    for kind in ("scheduler", "kv_cache"):
        chosen = {o for composition in EVERY for o in composition if o.startswith(f"{kind}=")}
        assert len(chosen) == len(AXES[kind]) > 1
