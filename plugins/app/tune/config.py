"""Options of the app `tune`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from dovetail.core.compose import ENGINE_NODES, AppConfig


class TuneConfig(AppConfig):
    """Measure the choices of all operations that a model runs on this GPU, such as the tiles of its matmuls, and keep
    the fastest in this machine's cache. An interrupted run continues where it was."""

    needs: ClassVar[tuple[str, ...]] = ENGINE_NODES

    models: tuple[str, ...] = ()
    """Names of models whose operations are tuned one after another; empty: the one of model=."""
    rows: tuple[Annotated[int, Field(ge=1, le=1 << 20)], ...] = ()
    """Numbers of rows to tune; empty: those of steps that run as CUDA graphs, up to 512."""
    ops: tuple[str, ...] = ()
    """Names of operations to tune, as in the report and in tables; empty: all of the model."""
    missing: bool = False
    """Leave out operations and numbers of rows for which `engine.tune_table`, this machine's cache or an installed
    table has an entry of this GPU. Entries of a GPU that is alike do not count."""
    seconds: float | None = Field(None, gt=0)
    """Time after which no measurement starts; null: no limit."""
    compile_seconds: float | None = Field(None, gt=0)
    """Time for the compilation of candidates; those that are not compiled by then are not timed, and an operation
    without any is left for another run. null: no limit."""
    candidates: int = Field(64, ge=1)
    """Candidates that are timed for each operation and number of rows, the most promising ones."""
    export: str | None = None
    """Write the entries of this run to this file, a tuning table for `engine.tune_table` or for a package. If it
    exists, its other entries are kept."""
