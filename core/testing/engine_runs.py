"""Tests of a component inside an engine that runs the bundled model on the CPU: equal runs, aborts, preemption, leaks.

Contract suites test a component alone. These tests catch what only shows among the other parts.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch

from dovetail.core.compose import KINDS, Composition, Registry, compose
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.errors import CapabilityError, ConfigError
from dovetail.core.interfaces import SamplingParams

__all__ = ["EngineRunContract"]

SMALL = ("engine.device=cpu", "engine.max_len=48", "engine.max_seqs=4", "engine.token_budget=32")
FEW_PAGES = ("engine.kv_pages=8",)
"""Fewer than four sequences of the longest length need: some are preempted, unless the scheduler prevents it."""
WITH = {
    "collective": ("executor=multiproc", "engine.tp=2"),
    "cost": ("scheduler=deadline",),
    "experts": ("model=small_moe", "executor=multiproc", "engine.tp=2"),
}
"""Kind -> overrides without which an engine does not call the component."""
REQUESTS = 7


class EngineRunContract:
    """Tests of one component in an engine. Subclasses set `kind` and `name`."""

    kind = ""
    name = ""
    overrides: ClassVar[Sequence[str]] = ()
    """More overrides of the composition, for instance to choose options without which the component does not run."""
    registry: ClassVar[Registry | None] = None
    """Components to choose from; None = the installed ones."""

    # Drivers

    def composition(self, *more: str, model: str = "tiny") -> Composition:
        """`model`: the bundled model, unless the component is a model or has one of its own in WITH."""
        choice = f"{'+' if KINDS[self.kind].cardinality == 'many' else ''}{self.kind}={self.name}"
        small = [*SMALL, *(() if self.kind in ("model", "experts") else (f"model={model}",))]
        return compose(
            [*small, *more, *WITH.get(self.kind, ()), choice, *self.overrides], app="generate", registry=self.registry
        )

    def engine(self, *more: str) -> Engine:
        """Start an engine whose clock counts, so that no decision depends on the speed of this machine."""
        try:
            engine = self._started(*more)
        except (CapabilityError, ConfigError) as error:
            pytest.skip(f"it does not run here: {error}")
        ticks = itertools.count()
        engine.clock = lambda: 1e-3 * next(ticks)
        return engine

    def _started(self, *more: str) -> Engine:
        """Start model=tiny, or model=tiny_moe for a component that needs latents, experts or a layer for multi-token
        prediction."""
        try:
            return start_engine(self.composition(*more))
        except (CapabilityError, ConfigError) as error:
            if self.kind in ("model", "experts"):
                raise
            try:
                return start_engine(self.composition(*more, model="tiny_moe"))
            except (CapabilityError, ConfigError):
                raise error from None

    def serve(self, engine: Engine, aborted: Sequence[int] = ()) -> dict[int, list[int]]:
        """Run sampled requests to their end and return the outputs by request. Each of `aborted` is dropped two steps
        after its first token."""
        rng, numbers = random.Random(1), {}
        vocab, longest = engine.info.spec.vocab, min(engine.info.max_len, 48)
        outputs: dict[int, list[int]] = {}
        for i in range(REQUESTS):
            prompt = [rng.randrange(vocab) for _ in range(rng.randrange(1, longest // 2))]
            params = SamplingParams(temperature=0.8, seed=i, max_tokens=longest // 3, ignore_eos=True)
            (seq,) = engine.add(prompt, params)
            numbers[seq.uid], outputs[i] = i, []
        ages: dict[int, int] = {}
        for _ in range(100 * REQUESTS):
            if not engine.has_work:
                return outputs
            for event in engine.step():
                outputs[numbers[event.uid]] += event.tokens
            for uid, i in numbers.items():
                ages[uid] = ages.get(uid, 0) + bool(outputs[i])
                if i in aborted and ages[uid] == 3:
                    engine.abort(uid)
        raise AssertionError(
            f"requests {sorted(outputs)} do not end: {len(outputs)} were added, more steps ran than all need"
        )

    # Properties

    def test_two_runs_with_equal_seeds_are_equal(self) -> None:
        """A run is repeatable: no draw, time or order of a set outside the seed may change an output."""
        found = []
        for _ in range(2):
            engine = self.engine()
            try:
                found.append(self.serve(engine))
            finally:
                engine.shutdown()
        assert found[0] == found[1], "two runs with equal seeds gave different tokens"

    def test_aborts_and_preemption_leave_nothing(self) -> None:
        """With few pages and aborted requests, the others end with all their tokens, and no page stays owned."""
        engine, aborted = self.engine(*FEW_PAGES), (1, 4)
        try:
            outputs = self.serve(engine, aborted)
            engine.kv.check()
            stats = engine.kv.stats()
            lengths = {len(tokens) for i, tokens in outputs.items() if i not in aborted}
            assert len(lengths) == 1, f"requests with equal max_tokens gave {sorted(lengths)} tokens"
            assert stats.owned == 0, f"{stats.owned} of {stats.pages} KV pages have an owner, but no sequence runs"
        finally:
            engine.shutdown()

    def test_an_engine_leaves_nothing_behind(self) -> None:
        """After shutdown there are no more threads, open files, processes or tensors than after the run before."""
        found = []
        for _ in range(3):  # the first one may load and cache
            engine = self.engine()
            try:
                self.serve(engine)
            finally:
                engine.shutdown()
            del engine
            found.append(_held())
        grown = [
            f"{what}: {before} became {found[2][what]}" for what, before in found[1].items() if found[2][what] > before
        ]
        assert not grown, f"each run of an engine leaves something behind: {'; '.join(grown)}"


def _held() -> dict[str, int]:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return {
        "threads": threading.active_count(),
        "open files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "tensors": len(tensors),
        "bytes of tensors": sum(
            tensor.untyped_storage().nbytes() for tensor in tensors if tensor.device.type != "meta"
        ),
    }
