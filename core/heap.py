"""Collections of garbage, which stop a whole process: a full one of what an engine imports and loads takes 0.2 s."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 1_000_000
"""New objects between two collections during imports, more than torch and transformers make together."""
_FEW = 10_000
"""New objects that one collection traverses in a few milliseconds."""
_SERVING = (_FEW, 20, 50)
"""Thresholds of a process that answers requests: one full collection for ten million new objects at most."""
_lock = threading.Lock()
_importing = 0
"""Number of blocks of `rare_collections` that are active, over all threads."""
_before = gc.get_threshold()
"""Thresholds to restore after the last of them."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely during imports: modules make many objects and hardly any garbage, and four full
    collections while torch is imported would find none. New ones count as old afterwards: freezing and unfreezing moves
    objects to the oldest generation without a traversal."""
    global _importing, _before
    with _lock:
        if not _importing:
            _before = gc.get_threshold()
            if 0 < _before[0] < _MANY:
                gc.set_threshold(_MANY, *_before[1:])
        _importing += 1
    try:
        yield
    finally:
        with _lock:
            _importing -= 1
            if not _importing:
                if gc.get_count()[0] > _FEW and not gc.get_freeze_count():
                    gc.freeze()
                    gc.unfreeze()
                # A module may have set others.
                if gc.get_threshold() == (_MANY, *_before[1:]):
                    gc.set_threshold(*_before)


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


@contextmanager
def short_collections() -> Iterator[None]:
    """Exclude what is loaded from collections, and collect new garbage rarely: in a process that answers requests, a
    body of a million JSON values takes three times as long to parse if they are traversed again and again."""
    before = gc.get_threshold()
    freeze_heap()
    gc.set_threshold(*_SERVING)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        unfreeze_heap()
