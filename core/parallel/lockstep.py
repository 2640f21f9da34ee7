"""Lockstep of simulated lanes: engines of one process and one thread, in virtual time (see core.parallel.lanes).

A lane cannot block in `agree`, since the others run in the same thread. It steps them instead, until each of them has
called `agree` for the same round: their calls nest, and the last one returns first. Executors report the launch of each
step here, since a step of all lanes begins once every lane has launched it, and ends for all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import Clock, StepShape

MOST = 100
"""Most lanes of one process: each takes six frames of Python's stack."""


_NO_ROWS = StepShape.of(())


class StepTimes(NamedTuple):
    """Times of a step that all lanes have launched, seconds."""

    ready: float
    """Time at which the devices are done."""
    seconds: float
    idle: float
    """Time before the step in which the devices waited for its launch."""


@dataclass(slots=True)
class _Step:
    works: list[Any] = field(default_factory=list)
    launched: float = 0.0
    """Time of the latest launch."""
    times: StepTimes | None = None
    taken: int = 0


class Lockstep:
    """The lanes of one process. Used by one thread."""

    def __init__(self, count: int) -> None:
        """Raises ConfigError for more lanes than one process can step."""
        if count > MOST:
            raise ConfigError(f"engine.dp={count}: at most {MOST} lanes are simulated in virtual time")
        self.count = count
        self.lanes = [InlineLanes(self, number) for number in range(count)]
        self.step: Callable[[int], object] = _not_started
        """Steps the engine of a lane. Set before the first step."""
        self._steps: dict[int, _Step] = {}
        self._free_at: float | None = None

    def launch(self, step: int, now: float, work: Any) -> list[Any] | None:
        """Note that a lane launches its plan of this step. `work` describes the plan. Return the works of all lanes if
        this one is the last; `run` must follow then."""
        found = self._steps.setdefault(step, _Step())
        found.works.append(work)
        found.launched = max(found.launched, now)
        return found.works if len(found.works) == self.count else None

    def run(self, step: int, seconds: float) -> None:
        """Set how long the step takes."""
        found = self._steps[step]
        free_at = found.launched if self._free_at is None else self._free_at
        began = max(found.launched, free_at)
        self._free_at = began + seconds
        found.times = StepTimes(self._free_at, seconds, began - free_at)

    def take(self, step: int) -> StepTimes:
        """Return the times of a step that every lane has launched; each lane calls this once."""
        found = self._steps[step]
        assert found.times is not None, f"a lane collects step {step}, which other lanes have not launched"
        found.taken += 1
        if found.taken == self.count:
            del self._steps[step]
        return found.times


class InlineLanes:
    """One lane's access, with the methods of core.parallel.lanes.Lanes that an engine calls."""

    clock: Clock
    """Time of this lane's engine. Set before the first step."""

    def __init__(self, group: Lockstep, number: int) -> None:
        self._group, self.number = group, number
        self._entry: tuple[bool, StepShape, float] = (False, _NO_ROWS, 0.0)
        """Entry of this lane in the last round, and the time of it."""
        self._rounds = 0
        self._awake = False

    @property
    def awake(self) -> bool:
        """Whether a round is due: one has begun elsewhere, or the last one had work."""
        return self._awake or any(other._rounds > self._rounds for other in self._group.lanes)

    def agree(self, shape: StepShape, active: bool) -> StepShape | None:
        """Step the other lanes until each has called this, and return the greatest bounds of all; None = no lane is
        active, and all sleep. `active`: this lane has work, even if it has no rows now."""
        lanes, round = self._group.lanes, self._rounds
        self._entry = (active, shape, self.clock.now())
        self._rounds = round + 1
        for other in lanes:
            while other._rounds <= round:
                self._group.step(other.number)
        # No lane begins another round before all calls of this one have returned.
        entries = [lane._entry for lane in lanes]
        self.clock.wait_until(max(entered for _, _, entered in entries))
        self._awake = any(active for active, _, _ in entries)
        return StepShape.greatest(shape for _, shape, _ in entries) if self._awake else None

    def close(self) -> None:
        """Lanes of one process have nothing to release."""


def _not_started(number: int) -> None:
    raise AssertionError("the lanes are stepped before Lockstep.step is set")
