"""Table of loaded adapters, and the assignment of the device's adapter slots to sequences."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.core.errors import ConfigError, RequestError, shown
from dovetail.core.files import path_kind
from dovetail.core.interfaces import Executor, ModelSpec, Resource, Sequence

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)

_MAX_NAME = 256
"""Characters."""
_MAX_REFUSALS = 32
"""Consecutive refusals, one per step, after which a waiting sequence may drain a slot. Until then requests for loaded
adapters go first, since switching adapters for each request would leave the device half idle."""


def check_folders(composition: Composition, spec: ModelSpec) -> None:
    """Raise ConfigError if the folder of an initial adapter is missing, and RequestError if no model of `spec` can have
    the adapter."""
    if "adapter" not in composition.parts:
        return
    part = composition.part("adapter")
    for name, folder in _initial(composition).items():
        if path_kind(folder) != "folder":
            raise ConfigError(f"adapter {name}: there is no folder {folder}")
        part.target().check(part.config, Path(folder), spec)


def _initial(composition: Composition) -> Mapping[str, str]:
    part = composition.part("adapter")
    found: Mapping[str, str] = part.target().initial(part.config)
    return found


class AdapterSlots(Resource):
    """Adapter slots of the device. Each holds one adapter, which any number of running sequences share. An unused slot
    goes to the first sequence that asks, least recently used first. A sequence that was refused too often drains a
    slot: the slot takes no new sequences, and `first` names the sequence that waits for it. Otherwise requests for
    loaded adapters could keep it waiting forever."""

    def __init__(self, count: int) -> None:
        self._keys = [""] * count
        """Adapter in each slot; "" = none."""
        self._users: list[set[int]] = [set() for _ in range(count)]
        """Uids that hold each slot."""
        self._by_last_use = list(range(count))
        """Slots, least recently used first."""
        self._slots: dict[int, int] = {}
        """uid -> slot."""
        self._refusals: dict[int, int] = {}
        """uid -> refusals since a slot last changed its adapter."""
        self._draining: int | None = None
        """The slot that takes no new sequences."""
        self._drained_for: int | None = None
        """Uid of the sequence that waits for that slot."""

    def slot(self, uid: int) -> int:
        """Return the slot of a sequence on the device; -1 = it holds none."""
        return self._slots.get(uid, -1)

    def try_acquire(self, seq: Sequence) -> bool:
        key, uid = seq.request.adapter, seq.uid
        if not key or uid in self._slots:
            return True
        slot = self._find(key)
        if slot is None:
            self._refusals[uid] = times = self._refusals.get(uid, 0) + 1
            if self._draining is None and times > _MAX_REFUSALS:
                self._draining = min(self._by_last_use, key=lambda slot: len(self._users[slot]))
                self._drained_for = uid
            return False
        self._stop_waiting(uid)
        if self._keys[slot] != key:
            self._keys[slot] = key
            self._draining = self._drained_for = None
            self._refusals = dict.fromkeys(self._refusals, 0)
        self._users[slot].add(uid)
        self._slots[uid] = slot
        return True

    def _find(self, key: str) -> int | None:
        if key in self._keys:
            slot = self._keys.index(key)
            return None if slot == self._draining and self._users[slot] else slot
        return next((slot for slot in self._by_last_use if not self._users[slot]), None)

    def release(self, seq: Sequence) -> None:
        slot = self._slots.pop(seq.uid, None)
        if slot is not None:
            self._users[slot].discard(seq.uid)
            if not self._users[slot]:
                self._by_last_use.remove(slot)
                self._by_last_use.append(slot)
        self._stop_waiting(seq.uid)

    def _stop_waiting(self, uid: int) -> None:
        self._refusals.pop(uid, None)
        if uid == self._drained_for:
            self._draining = self._drained_for = None

    @property
    def first(self) -> int | None:
        return self._drained_for

    def forget(self, key: str) -> None:
        """Drop an unloaded adapter. Its slot is reused first."""
        if key in self._keys:
            slot = self._keys.index(key)
            self._keys[slot] = ""
            self._by_last_use.remove(slot)
            self._by_last_use.insert(0, slot)


@dataclass(frozen=True, slots=True)
class _Loaded:
    key: str
    """name@load number. An adapter loaded again under the same name is a different one, also to the prefix cache."""
    folder: str
    future: Future[None]


class AdapterTable:
    """Adapters by name. Only the engine's thread calls it."""

    def __init__(self, executor: Executor, slots: int) -> None:
        """0 slots = the engine serves no adapters and refuses requests for one."""
        self.slots = AdapterSlots(slots)
        self._executor, self._served = executor, slots > 0
        self._load_numbers = itertools.count(1)
        self._loaded: dict[str, _Loaded] = {}
        self._unloading: set[str] = set()
        """Keys of unloaded adapters that some sequence still uses."""

    @property
    def names(self) -> Mapping[str, str]:
        """Adapters that requests may choose: name -> folder."""
        return {name: entry.folder for name, entry in self._loaded.items() if _ready(entry)}

    def load_first(self, composition: Composition) -> None:
        """Load the adapters that the composition names, and wait for them."""
        loads = {name: (folder, self.load(name, folder)) for name, folder in _initial(composition).items()}
        for name, (folder, future) in loads.items():
            try:
                future.result()
            except RequestError as error:
                raise RequestError(f"adapter.load: {name} from {folder}: {error}") from None

    def load(self, name: str, folder: str) -> Future[None]:
        """Load an adapter while steps go on. Its name is taken at once, usable when done, and freed on failure."""
        self._check_served()
        if not name or len(name) > _MAX_NAME or not name.isprintable():
            raise RequestError(f"adapter: {shown(name)} is no name: give 1 to {_MAX_NAME} printable characters")
        self._drop_failed()
        if name in self._loaded:
            raise RequestError(f"adapter: {name!r} is loaded already: unload it, or take another name")
        key = f"{name}@{next(self._load_numbers)}"
        future = self._executor.load_adapter(key, folder)
        self._loaded[name] = _Loaded(key, folder, future)
        future.add_done_callback(lambda done: _log_loaded(name, folder, done))
        return future

    def unload(self, name: str, used: Collection[str]) -> None:
        """Unload an adapter once unused; no new request can choose it from now on. `used`: keys of all sequences."""
        self._check_served()
        self._drop_failed()
        entry = self._loaded.get(name)
        if entry is None:
            raise self._unknown(name)
        if not entry.future.done():
            raise RequestError(f"adapter: {name!r} is still being loaded: unload it after that")
        del self._loaded[name]
        self._unloading.add(entry.key)
        self.unload_unused(used)

    def unload_unused(self, used: Collection[str]) -> None:
        """Make the ranks drop the unloaded adapters that are not in `used`."""
        for key in self._unloading.difference(used):
            self._unloading.remove(key)
            self.slots.forget(key)
            self._executor.unload_adapter(key)

    @property
    def unloading(self) -> bool:
        """Whether an unloaded adapter is still in use."""
        return bool(self._unloading)

    def key(self, name: str) -> str:
        """Return the key of a loaded adapter, for Request.adapter."""
        self._check_served()
        entry = self._loaded.get(name)
        if entry is None or not _ready(entry):
            raise self._unknown(name)
        return entry.key

    def _check_served(self) -> None:
        if not self._served:
            raise unknown_adapter("", (), served=False)

    def _drop_failed(self) -> None:
        """Drop the adapters that could not be loaded, also on ranks that have read them."""
        for name, entry in list(self._loaded.items()):
            if _failed(entry):
                del self._loaded[name]
                self._executor.unload_adapter(entry.key)

    def _unknown(self, name: str) -> RequestError:
        return unknown_adapter(name, self.names, served=True)


def unknown_adapter(name: str, names: Iterable[str], *, served: bool) -> RequestError:
    """Return the error for an adapter that is not among `names`. `served`: whether the engine serves adapters."""
    if not served:
        return RequestError("adapter: this engine has none (adapter=none); adapter=lora serves some", status=404)
    return RequestError(f"adapter: {shown(name)} is not loaded; there is {', '.join(names) or 'none'}", status=404)


def _failed(entry: _Loaded) -> bool:
    return entry.future.done() and not _ready(entry)


def _ready(entry: _Loaded) -> bool:
    future = entry.future
    return future.done() and not future.cancelled() and future.exception() is None


def _log_loaded(name: str, folder: str, done: Future[None]) -> None:
    if done.cancelled():
        return
    if (error := done.exception()) is None:
        log.info("adapter %s loaded from %s", name, folder)
    else:
        log.warning("adapter %s from %s was not loaded: %s", name, shown(Path(folder)), error)
