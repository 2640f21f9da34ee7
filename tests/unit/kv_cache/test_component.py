from __future__ import annotations

import subprocess
import sys

from dovetail.core.compose.kinds import KINDS
from dovetail.core.interfaces import KVAllocator
from dovetail.plugins.kv_cache import COMPONENTS


def test_listing_loads_neither_torch_nor_the_allocators() -> None:
    code = (
        "import sys, dovetail.plugins.kv_cache; "
        "print([m for m in sys.modules if m == 'torch' or m.startswith('dovetail.core.memory')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_components_name_allocators_of_this_contract() -> None:
    from importlib import import_module

    for component in COMPONENTS:
        module, _, name = component.target.partition(":")
        assert issubclass(getattr(import_module(module), name), KVAllocator)
        assert component.api == KINDS["kv_cache"].api
