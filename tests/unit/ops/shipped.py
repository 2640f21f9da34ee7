"""The tuning table that Dovetail ships."""

from __future__ import annotations

from dovetail.core.ops.choices import Choices
from dovetail.core.tuning.cache import CHECKS
from dovetail.core.tuning.matmul import tiles_of
from dovetail.core.tuning.packages import BUILTIN, read_packaged

TABLE = read_packaged(BUILTIN, "dovetail", CHECKS)
SHIPPED = Choices(TABLE.entries)
TILES = tiles_of(TABLE)
