"""Garbage collection during imports, and what ranks exclude from it."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from dovetail.core.heap import rare_collections, short_collections, unfreeze_heap
from dovetail.core.parallel import worker

CODE = """
import gc
from dovetail.core.compose import compose
model, counts = compose(["model=tiny"]).part("model"), [0, 0, 0]
gc.callbacks.append(lambda phase, info: counts.__setitem__(info["generation"], counts[info["generation"]] + 1))
before = gc.get_threshold()
model.target()
import sys
assert "torch" in sys.modules and not gc.get_freeze_count()
assert gc.get_threshold() == before
print(*counts, len(gc.get_objects(generation=2)) > 50_000)
"""


@pytest.fixture
def threshold() -> Iterator[tuple[int, int, int]]:
    """The thresholds of this process; a test may change them."""
    found = gc.get_threshold()
    yield found
    gc.set_threshold(*found)


def test_importing_a_component_with_torch_collects_no_garbage():
    """The objects of its modules count as old at once, so that no later collection of young ones traverses them."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0", "0", "0", "True"], done.stderr


def test_thresholds_are_restored_after_the_last_import(threshold):
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with rare_collections():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with pytest.raises(ImportError), rare_collections():
        thread.start()
        assert inside.wait(60)
        raise ImportError
    assert gc.get_threshold()[0] > threshold[0], "the other import goes on"
    leave.set()
    thread.join()
    assert gc.get_threshold() == threshold


@pytest.mark.parametrize("first", [0, 10_000_000])
def test_a_caller_who_wants_fewer_collections_keeps_them(first, threshold):
    gc.set_threshold(first, *threshold[1:])
    with rare_collections():
        assert gc.get_threshold()[0] == first
    assert gc.get_threshold()[0] == first


def test_thresholds_that_a_module_sets_stay(threshold):
    with rare_collections():
        gc.set_threshold(5000, 10, 10)
    assert gc.get_threshold() == (5000, 10, 10)


def rank(*args: Any, **kwargs: Any) -> Mock:
    """Return a rank without a model."""
    return Mock(info=Mock(num_pages={}))


def test_a_rank_excludes_what_it_loaded_from_collections_before_it_serves(monkeypatch):
    """A full collection in one rank would stop the steps of all of them."""
    frozen: dict[str, int] = {}
    control = Mock()
    control.send.side_effect = lambda message: frozen.setdefault(message["op"], gc.get_freeze_count())
    control.recv.side_effect = [({"op": op, "pages": []}, ()) for op in ("load", "bind", "shutdown")]
    monkeypatch.setattr(worker, "RingReader", lambda fd, reader: Mock(recv=lambda idle: worker.CONTROL))
    order = {"rank": 1, "size": 2, "plan_fd": 0, "blob_fd": 0, "loader": f"{__name__}:rank", "address": ""}
    unfreeze_heap()  # another test's engine may run
    try:
        worker._Worker(control, order, Mock()).run()
    finally:
        unfreeze_heap()
    assert frozen["loaded"] == 0 and frozen["bound"] > 10_000


def test_a_server_seldom_traverses_what_is_new() -> None:
    """A body of many JSON values keeps the event loop waiting for collections, of which none finds garbage."""
    before, collections = gc.get_threshold(), Counter[int]()

    def count(phase: str, info: dict[str, int]) -> None:
        collections[info["generation"]] += phase == "start"

    gc.callbacks.append(count)
    try:
        with short_collections():
            assert gc.get_freeze_count()
            values = json.loads(f"[{','.join(['[7]'] * 1_000_000)}]")
    finally:
        gc.callbacks.remove(count)
    assert len(values) == 1_000_000 and collections[2] == 0 and 0 < collections[0] < 200
    assert gc.get_threshold() == before and not gc.get_freeze_count()
