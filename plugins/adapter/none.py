"""No adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.core.errors import RequestError
from dovetail.core.interfaces import Adapters, LayerAdapters, LinearSite


class NoAdapters(Adapters):
    slots = 0

    @classmethod
    def initial(cls, config: Any) -> Mapping[str, str]:
        return {}

    def attach(self, site: LinearSite) -> LayerAdapters:
        raise NotImplementedError("an engine with adapter=none attaches nothing")

    def allocate(self) -> None: ...

    def read(self, key: str, folder: Path) -> None:
        raise RequestError("adapters: this engine runs with adapter=none; adapter=lora serves LoRA adapters")

    def place(self, slot: int, key: str) -> None:
        raise NotImplementedError("an engine with adapter=none has no slots")

    def drop(self, key: str) -> None: ...
