"""The observer seam: sees one immutable record per step, off the critical path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step."""

    step: int
    clock: float
    """Engine clock when the result came, seconds."""
    rows: int
    tokens: int
    """Fed, drafts included."""
    sampled: int
    """Output tokens gained."""
    drafted: int
    """Draft tokens verified at most."""
    accepted: int
    """Draft tokens accepted."""
    waiting: int
    running: int
    kv_used: float
    """Share of pages owned by sequences."""
    schedule_seconds: float
    """Host time spent on this plan."""
    device_seconds: float


class Observer(ABC):
    """A failing observer is named, reported once and removed; it never stops the engine."""

    def __init__(self, config: object) -> None:
        self.config = config

    @abstractmethod
    def step(self, record: StepRecord) -> None:
        """After each step, in order, in the engine's thread. The record may be kept."""

    def close(self) -> None:
        """The engine shuts down, or `step` failed. May be called again."""
