"""The tuning tables that Dovetail ships."""

from __future__ import annotations

from dovetail.core.ops.choices import Choices
from dovetail.core.tuning.cache import CHECKS
from dovetail.core.tuning.matmul import tiles_of
from dovetail.core.tuning.packages import builtin_table

TABLE = builtin_table(CHECKS)
SHIPPED = Choices(TABLE.entries)
TILES = tiles_of(TABLE)
