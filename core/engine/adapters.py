"""Which adapters are loaded, and who holds the device's slots for them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.core.errors import ConfigError, RequestError
from dovetail.core.interfaces import Executor, Resource, Sequence

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)


_LONGEST_NAME = 256
_TERM = 32
"""Refusals of a sequence, one a step, before it has a slot emptied. Until then whoever wants an adapter that is in
joins its batch: adapters that took turns for each request would leave the device half idle."""


def check_folders(composition: Composition) -> None:
    """Those of adapters to begin with are there: told before the model is loaded."""
    if "adapter" in composition.parts:
        for name, folder in _initial(composition).items():
            if not Path(folder).is_dir():
                raise ConfigError(f"adapter {name}: there is no folder {folder}")


def _initial(composition: Composition) -> Mapping[str, str]:
    part = composition.part("adapter")
    found: Mapping[str, str] = part.target().initial(part.config)
    return found


class AdapterSlots(Resource):
    """Slots of the device, each with one adapter, which any number of running sequences share.

    A slot that nobody runs with goes to the first that asks, the longest unused one first. When somebody has been
    refused for a while, one slot takes nobody new, so that it will be free, and he is to be asked first: without that,
    requests for adapters that are in would keep him out for ever.
    """

    def __init__(self, count: int) -> None:
        self._keys = [""] * count
        """What each slot holds."""
        self._users: list[set[int]] = [set() for _ in range(count)]
        self._order = list(range(count))
        """Slots, the one whose last user left longest ago first."""
        self._held: dict[int, int] = {}
        """uid -> slot"""
        self._refused: dict[int, int] = {}
        """uid -> how often since a slot changed hands, of those who wait."""
        self._emptying: int | None = None
        """The slot that takes nobody new."""
        self._first: int | None = None
        """For whom: a uid."""

    def slot(self, uid: int) -> int:
        """Of a sequence on the device; -1 = it holds none."""
        return self._held.get(uid, -1)

    def try_acquire(self, seq: Sequence) -> bool:
        key, uid = seq.request.adapter, seq.uid
        if not key or uid in self._held:
            return True
        slot = self._find(key)
        if slot is None:
            self._refused[uid] = times = self._refused.get(uid, 0) + 1
            if self._emptying is None and times > _TERM:
                self._emptying = min(self._order, key=lambda slot: len(self._users[slot]))
                self._first = uid
            return False
        self._gone(uid)
        if self._keys[slot] != key:
            self._keys[slot] = key
            self._emptying = self._first = None
            self._refused = dict.fromkeys(self._refused, 0)
        self._users[slot].add(uid)
        self._held[uid] = slot
        return True

    def _find(self, key: str) -> int | None:
        if key in self._keys:
            slot = self._keys.index(key)
            return None if slot == self._emptying and self._users[slot] else slot
        return next((slot for slot in self._order if not self._users[slot]), None)

    def release(self, seq: Sequence) -> None:
        slot = self._held.pop(seq.uid, None)
        if slot is not None:
            self._users[slot].discard(seq.uid)
            if not self._users[slot]:
                self._order.remove(slot)
                self._order.append(slot)
        self._gone(seq.uid)

    def _gone(self, uid: int) -> None:
        """It does not wait any more."""
        self._refused.pop(uid, None)
        if uid == self._first:
            self._emptying = self._first = None

    @property
    def first(self) -> int | None:
        return self._first

    def forget(self, key: str) -> None:
        """An adapter that nobody will ask for again: its slot goes first."""
        if key in self._keys:
            slot = self._keys.index(key)
            self._keys[slot] = ""
            self._order.remove(slot)
            self._order.insert(0, slot)


@dataclass(frozen=True, slots=True)
class _Loaded:
    key: str
    """Name and load: what was loaded again under a name is another adapter, to the prefix cache as well."""
    folder: str
    future: Future[None]


class AdapterTable:
    """Adapters by name. The engine's thread alone calls it."""

    def __init__(self, executor: Executor, slots: int) -> None:
        """0 slots: there are no adapters, and asking for one is refused."""
        self.slots = AdapterSlots(slots)
        self._executor, self._served = executor, slots > 0
        self._loads = itertools.count(1)
        self._loaded: dict[str, _Loaded] = {}
        self._leaving: set[str] = set()
        """Keys whose name is gone and with which somebody still runs."""

    @property
    def names(self) -> Mapping[str, str]:
        """Of adapters that requests may choose -> folder."""
        return {name: entry.folder for name, entry in self._loaded.items() if _ready(entry)}

    def load_first(self, composition: Composition) -> None:
        """What the composition names. Blocks."""
        for future in [self.load(name, folder) for name, folder in _initial(composition).items()]:
            future.result()

    def load(self, name: str, folder: str) -> Future[None]:
        """Steps go on meanwhile. The name is taken from now on, and can be chosen once the future is done; where that
        fails, the name is free again."""
        self._check_served()
        if not name or len(name) > _LONGEST_NAME or not name.isprintable():
            raise RequestError(f"adapter: {name!r} is no name: give 1 to {_LONGEST_NAME} printable characters")
        self._purge()
        if (entry := self._loaded.get(name)) is not None:
            raise RequestError(f"adapter: {name!r} is loaded, from {entry.folder}: unload it, or take another name")
        key = f"{name}@{next(self._loads)}"
        future = self._executor.load_adapter(key, folder)
        self._loaded[name] = _Loaded(key, folder, future)
        future.add_done_callback(lambda done: _report(name, folder, done))
        return future

    def unload(self, name: str, used: Collection[str]) -> None:
        """No new request may choose it; it is gone when the last one that runs with it has ended. `used`: keys of all
        sequences."""
        self._check_served()
        self._purge()
        entry = self._loaded.get(name)
        if entry is None:
            raise self._unknown(name)
        if not entry.future.done():
            raise RequestError(f"adapter: {name!r} is still being loaded: unload it when it is")
        del self._loaded[name]
        self._leaving.add(entry.key)
        self.sweep(used)

    def sweep(self, used: Collection[str]) -> None:
        """Let the ranks forget what left and nobody uses any more."""
        for key in self._leaving.difference(used):
            self._leaving.remove(key)
            self.slots.forget(key)
            self._executor.unload_adapter(key)

    @property
    def leaving(self) -> bool:
        """Some adapter waits for its last sequence."""
        return bool(self._leaving)

    def key(self, name: str) -> str:
        """For Request.adapter."""
        self._check_served()
        entry = self._loaded.get(name)
        if entry is None or not _ready(entry):
            raise self._unknown(name)
        return entry.key

    def _check_served(self) -> None:
        if not self._served:
            raise unknown_adapter("", (), served=False)

    def _purge(self) -> None:
        """What could not be loaded; some ranks may have read it."""
        for name, entry in list(self._loaded.items()):
            if _failed(entry):
                del self._loaded[name]
                self._executor.unload_adapter(entry.key)

    def _unknown(self, name: str) -> RequestError:
        return unknown_adapter(name, self.names, served=True)


def unknown_adapter(name: str, names: Iterable[str], *, served: bool) -> RequestError:
    """The refusal of an adapter that is not among `names`. `served`: the engine has adapters at all."""
    if not served:
        return RequestError("adapter: this engine has none (adapter=none); adapter=lora serves some", status=404)
    return RequestError(f"adapter: {name!r} is not loaded; there is {', '.join(names) or 'none'}", status=404)


def _failed(entry: _Loaded) -> bool:
    return entry.future.done() and not _ready(entry)


def _ready(entry: _Loaded) -> bool:
    future = entry.future
    return future.done() and not future.cancelled() and future.exception() is None


def _report(name: str, folder: str, done: Future[None]) -> None:
    if not done.cancelled() and done.exception() is None:
        log.info("adapter %s loaded from %s", name, folder)
