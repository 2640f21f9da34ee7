"""Options of the app `check`."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from dovetail.core.compose import ENGINE_NODES, AppConfig


class CheckConfig(AppConfig):
    """Test the components of a package: contract suites, runs in an engine, a small benchmark. Prints a report card,
    and exits with 1 if something fails. The parts and the engine's settings are those of the benchmark."""

    needs: ClassVar[tuple[str, ...]] = (*ENGINE_NODES, "workload")

    package: str | None = None
    """Name of an installed package, as in pip: every component that it registers is checked, and the package itself."""
    component: str | None = None
    """Kind and name of one component, such as scheduler/mine, instead of a package."""
    engine: bool = True
    """Whether components also run in engines with the bundled model: equal runs, aborts, preemption, leaks."""
    rounds: int = Field(3, ge=0)
    """Rounds of the benchmark, in which each component and the ones beside it start once; 0 = no benchmark. Intervals
    need two."""
    beside: tuple[str, ...] = ()
    """Names of built-in components that the benchmark also runs, beside the checked one of their kind; the one that is
    chosen otherwise always runs."""
    timeout: float = Field(1800.0, gt=0)
    """Time limit of all tests together, seconds."""
    format: Literal["text", "json"] = "text"
    """Form of the report card on stdout."""
    html: str | None = None
    """File for the report card as an HTML page."""
    out: str | None = None
    """File for the report card as JSON."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.package is None) == (self.component is None):
            raise ValueError("give either package or component: check.package=acme or check.component=scheduler/mine")
        return self
