"""Observers of one engine: who fails is reported and removed, and stops nothing."""

from __future__ import annotations

import logging

from dovetail.core.interfaces import Observer, StepRecord

log = logging.getLogger(__name__)


class Observers(dict[str, Observer]):
    """By name."""

    def step(self, record: StepRecord) -> None:
        for name, observer in list(self.items()):
            try:
                observer.step(record)
            except Exception:
                log.exception("observer %s failed and was removed", name)
                _close(name, self.pop(name))

    def close(self) -> None:
        for name, observer in self.items():
            _close(name, observer)


def _close(name: str, observer: Observer) -> None:
    try:
        observer.close()
    except Exception:
        log.exception("observer %s failed to close", name)
