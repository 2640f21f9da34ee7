"""Observer contract: receives one immutable record per step, off the critical path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step."""

    step: int
    clock: float
    """Engine clock in seconds when the result arrived."""
    rows: int
    tokens: int
    """Tokens fed, drafts included."""
    sampled: int
    """Output tokens produced."""
    drafted: int
    """Draft tokens verified."""
    accepted: int
    """Draft tokens accepted."""
    waiting: int
    running: int
    kv_used: float
    """Fraction of pages owned by sequences."""
    schedule_seconds: float
    """Host time for this plan."""
    device_seconds: float
    expert_load: float = 0.0
    """Pairs of token and routed expert in a step and layer, on the busiest expert rank, averaged over layers and over
    the steps since they were last reported (`experts.rebalance`); 0 = this record reports none."""
    mean_expert_load: float = 0.0
    """The same on the mean of all expert ranks."""


class Observer(ABC):
    """Consumer of step records. One that raises is reported once, by name, and removed; it never stops the engine."""

    def __init__(self, config: object) -> None:
        self.config = config

    @abstractmethod
    def step(self, record: StepRecord) -> None:
        """Called after each step, in order, in the engine's thread. The record may be kept."""

    def close(self) -> None:
        """Release resources. Called at engine shutdown or after `step` raised; may be called again."""
