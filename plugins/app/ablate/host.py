"""Check of the variants on this host before any of them is loaded."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import CapabilityError, DovetailError
from dovetail.core.parallel.process import order_for
from dovetail.plugins.app.ablate.children import Child, Failure
from dovetail.plugins.app.ablate.config import AblateConfig
from dovetail.plugins.app.ablate.variants import Variant, make, one_error

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


@dataclass(frozen=True, slots=True)
class Checked:
    variants: list[Variant]
    machine: dict[str, Any]
    quality: dict[str, Any] | None
    """Prompts that every variant answers, from `probe.plan`; None = no quality check."""

    @property
    def baselines(self) -> list[Variant]:
        """The first variant of each block."""
        return [variant for variant in self.variants if not variant.baselines]

    @property
    def running(self) -> list[Variant]:
        return [variant for variant in self.variants if variant.skipped is None]


def check(config: AblateConfig, composition: Composition, order: dict[str, Any]) -> Checked:
    """Check all variants in a separate process, since a process that queries a GPU occupies memory on it. Raises one
    error with the mistakes of all variants."""
    mistakes: dict[str, str] = {}
    answers: dict[str, dict[str, Any]] = {}
    """Block -> answer about its first variant that can run."""

    def unfit(name: str, one: Composition, block: str) -> str | None:
        found = child.ask(order_for(one) | order | {"workload": one.choices["workload"]})
        if mistake := found.get("mistake"):
            mistakes[name] = mistake
        elif requests := found.get("requests"):
            if requests != answers.setdefault(block, found)["requests"]:
                mistakes[name] = (
                    "it would get other requests than the baseline, so their figures could not be compared: "
                    "requests depend on the model's vocabulary, engine.seed and engine.max_len"
                )
        reason: str | None = found.get("unfit")
        return reason

    with closing(Child("check")) as child:
        try:
            machine = child.ask({"machine": True})
            variants = make(config, composition, unfit)
        except Failure as failure:
            raise DovetailError(f"the check of the variants failed: {failure}") from None
    if mistakes:
        # A mistake in the given command line is shared by all variants: report it once.
        shared = len(mistakes) == len(variants) and len(set(mistakes.values())) == 1
        raise one_error([text if shared else f"{name}: {text}" for name, text in mistakes.items()])
    checked = Checked(variants, machine, next((found["quality"] for found in answers.values()), None))
    if unable := [one for one in checked.baselines if one.skipped is not None]:
        raise CapabilityError([f"{one.name}, the baseline: {one.skipped}" for one in unable])
    if len(checked.running) == len(checked.baselines):
        raise CapabilityError([f"{other.name}: {other.skipped}" for other in variants if other.skipped is not None])
    return checked
