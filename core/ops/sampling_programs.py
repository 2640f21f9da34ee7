"""Choice of how many programs share the logits of all rows when tokens are drawn. More of them fill the GPU with few
rows; fewer have less to join. The tokens do not depend on it. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from dovetail.core.errors import shown
from dovetail.core.interfaces.tuning import Choice, Key, make_key
from dovetail.core.ops.choices import installed

DRAW, FILTER = "draw", "draw_filtered"
"""Names in tuning tables of drawing without filters, and of searching the logits that filters keep."""
PART_COLUMNS = 2048
"""Logits of a row of which each program has at least as many."""
PROGRAMS = {DRAW: 1024, FILTER: 2048}
"""Programs of all rows together without an entry; enough to fill a large GPU several times."""
TRIED = tuple(1 << i for i in range(3, 14))
DTYPES = ("bfloat16", "float16", "float32")


@cache
def sampling_key(vocab: int, dtype: str) -> Key:
    """`vocab`: logits of a row, of this rank where each draws from its part. `dtype`: the logits'."""
    return make_key(vocab=vocab, dtype=dtype)


def parts_of(op: str, rows: int, blocks: int, programs: int | None = None) -> int:
    """Return the number of programs of a row. `blocks`: pieces of a row of which a program has at least one."""
    return max(1, min(blocks, (programs or PROGRAMS[op]) // rows))


def chosen_programs(op: str, gpu: str, vocab: int, dtype: str, rows: int) -> int:
    """Return the installed number of programs for these rows, or the default."""
    choice = installed().find(op, gpu, sampling_key(vocab, dtype), rows)
    return PROGRAMS[op] if choice is None else int(choice["programs"])


def check_sampling(key: Key, rows: int, choice: Choice) -> None:
    """Raise ValueError if an entry of a table cannot be the choice of a draw."""
    facts: Mapping[str, Any] = dict(key)
    if set(facts) != {"vocab", "dtype"}:
        raise ValueError(f"the key of a draw has vocab and dtype; this one has {', '.join(facts)}")
    if facts["dtype"] not in DTYPES:
        raise ValueError(f"dtype is {shown(facts['dtype'])}; there are {', '.join(DTYPES)}")
    if set(choice) != {"programs"}:
        raise ValueError(f"the choice of a draw has programs; this one has {', '.join(choice) or 'nothing'}")
    programs = choice["programs"]
    if isinstance(programs, bool) or not isinstance(programs, int) or not 1 <= programs <= 1 << 16:
        raise ValueError(f"programs is {shown(programs)}, not a whole number from 1 to 65536")
