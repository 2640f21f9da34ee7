"""The file of a calibration: factors of a cost model's terms, and what they were measured with. Imports no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.core.calibration.launches import Launches
from dovetail.core.errors import ConfigError, shown
from dovetail.core.interfaces import StepTerms

if TYPE_CHECKING:
    from dovetail.core.interfaces import Formats, ModelSpec

SCHEMA = "dovetail.calibration/2"
"""Version of the format. A reader takes its own version only."""

SHAPES = ("architecture", "vocab", "layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim")
"""Fields of ModelSpec that determine the time of a step."""
FORMATS = ("dtype", "weight_bits", "product", "kv_bytes")
"""Fields of Formats that do."""


_MOST_FACTOR = 1e6


class Term(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fit of one term."""

    factor: float
    """Measured over predicted time."""
    fitted: bool
    """False = too small a part of the measured steps; the factor is that of the prior, 1."""
    share: float
    """Part of the measured time that it takes, after the fit."""
    least_us: float
    """Least and greatest time in the fitted steps as the prior predicts it, microseconds."""
    most_us: float


class Errors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Relative errors of predicted step times, absolute values."""

    median: float
    p90: float


class Prior(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cost model whose terms were scaled."""

    name: str
    options: dict[str, Any]


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    schema: str = SCHEMA
    when: str
    command: str
    commit: dict[str, Any] | None
    versions: dict[str, str]
    device: str
    """Name of the GPU, "cpu" or "simulated"."""
    model: dict[str, Any]
    """Shapes of the model."""
    drafter: dict[str, Any] | None
    """Shapes of the model inside the drafter."""
    formats: dict[str, Any]
    layout: dict[str, int]
    """Ranks by kind of parallelism."""
    parts: dict[str, str]
    """Component of each kind."""
    overrides: list[str]
    workloads: list[str]
    held_out: list[str]
    """Workloads that were measured as well and whose steps were not fitted."""
    prior: Prior
    terms: dict[str, Term]
    drafting: Term | None
    """Time of the drafter's model; None = no step had drafts of one."""
    host: Launches | None
    """Host time of launches; None = no launch with a CUDA graph was measured."""
    ranges: dict[str, tuple[int, int]]
    """Least and greatest number of rows, tokens fed and KV tokens read of the fitted steps."""
    gap: tuple[int, int] | None
    """Numbers of tokens between which no step was measured, if they are far apart; None = they are not."""
    steps: int
    errors: Errors
    uncalibrated: Errors
    """Errors of the prior over the same steps."""

    @property
    def factors(self) -> StepTerms:
        return StepTerms(**{name: term.factor for name, term in self.terms.items()})


def shapes(spec: ModelSpec) -> dict[str, Any]:
    found = {name: getattr(spec, name) for name in SHAPES}
    return found | {"experts": spec.moe.experts if spec.moe is not None else 0}


def formats(used: Formats) -> dict[str, Any]:
    return {name: getattr(used, name) for name in FORMATS}


def differences(here: dict[str, Any], there: dict[str, Any]) -> str:
    """Return what differs, in words: "layers 32 (here 80)"; empty if nothing does."""
    return ", ".join(
        f"{name} {there.get(name)} (here {value})" for name, value in here.items() if value != there.get(name)
    )


def check_absent(path: str, option: str) -> None:
    """Raise ConfigError if no calibration can be written to `path`, in particular if there is a file."""
    place = Path(path).expanduser()
    if place.exists():
        raise ConfigError(f"{option}={shown(place)}: the file exists, and nothing is overwritten: choose another path")
    if not place.absolute().parent.is_dir():
        raise ConfigError(f"{option}={shown(place)}: there is no folder {shown(place.absolute().parent)}")


def write(path: str, calibration: Calibration) -> None:
    text = msgspec.json.format(msgspec.json.encode(calibration), indent=1)
    with open(Path(path).expanduser(), "xb") as file:
        file.write(text + b"\n")


def read(path: str, option: str) -> Calibration:
    """Read a calibration. Raises ConfigError, which names `option`, for a file that is none, has another version or is
    damaged."""
    where = f"{option}={shown(Path(path))}"
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror})") from None
    try:
        version = msgspec.json.decode(data, type=dict[str, Any]).get("schema")
        if version == SCHEMA:
            found = msgspec.json.decode(data, type=Calibration)
            _check(found)
            return found
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{where}: it is no calibration, or was cut off or damaged ({error})") from None
    if not str(version).startswith("dovetail.calibration/"):
        raise ConfigError(f"{where}: it is no calibration; app=bench bench.calibrate=PATH makes one")
    raise ConfigError(f"{where}: its format is {version}; this version of Dovetail reads {SCHEMA}")


def _check(found: Calibration) -> None:
    if found.terms.keys() != set(StepTerms._fields):
        raise ValueError(f"its terms are {', '.join(found.terms)}, not {', '.join(StepTerms._fields)}")
    terms = {**found.terms, **({"drafting": found.drafting} if found.drafting is not None else {})}
    times = () if found.host is None else msgspec.structs.astuple(found.host)
    if not all(math.isfinite(value) and value >= 0 for value in times):
        raise ValueError(f"a launch takes {times} microseconds")
    for name, term in terms.items():
        if not 0 <= term.factor <= _MOST_FACTOR:
            raise ValueError(f"the factor of {name} is {term.factor}")
