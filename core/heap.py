"""Collections of garbage, which stop a whole process: a full one of what an engine imports and loads takes 0.2 s."""

from __future__ import annotations

import gc
import sys


def freeze_heap(*, collect: bool | None = None) -> None:
    """Exclude all objects loaded so far from garbage collection, so that each collection is short. `collect`: what is
    garbage by now is freed first; None = where it may hold memory of a GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and collect is None:
        collect = torch.cuda.is_initialized()
    if collect:
        gc.collect()
    gc.freeze()


def unfreeze_heap() -> None:
    """Collect garbage among all objects again, also those that other engines or callers of gc.freeze excluded."""
    gc.unfreeze()
