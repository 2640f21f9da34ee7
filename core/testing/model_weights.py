"""Part of the contract suite for models: dummy weights, checkpoints and tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import BuildContext, Collective, Model, ModelSpec
from dovetail.core.interfaces.checkpoint import WeightSource
from dovetail.core.testing.checkpoint import MemoryCheckpoint
from dovetail.core.testing.model_driver import Lazy
from dovetail.core.testing.numeric import assert_near, poisoned_memory, same_bits
from dovetail.core.testing.rank_threads import on_threads

Weights = Mapping[str, torch.Tensor]
"""Full checkpoint by tensor name."""


class _Headers(MemoryCheckpoint):
    """Headers of tensors in memory."""

    def __init__(self, weights: Weights) -> None:
        super().__init__({}, tensors=weights)

    def open(self) -> WeightSource:
        raise AssertionError("check_checkpoint must not read tensors")


class WeightTests:
    """Tests that ModelContract inherits. It has the meaning and defaults of the settings."""

    tolerance: float
    ranks: tuple[int, ...]
    idle: tuple[str, ...]
    ignored: tuple[str, ...]

    def make(self, build: BuildContext) -> Model:
        raise NotImplementedError

    def spec(self) -> ModelSpec:
        raise NotImplementedError

    def checkpoint(self) -> Weights | None:
        raise NotImplementedError

    def _build(self, **options: Any) -> BuildContext:
        raise NotImplementedError

    def _model(self, **options: Any) -> Model:
        raise NotImplementedError

    def _tokens(self, count: int) -> list[int]:
        raise NotImplementedError

    def _logits(self, model: Model, tokens: Sequence[int]) -> torch.Tensor:
        raise NotImplementedError

    def test_dummy_weights_depend_on_the_seed_alone(self) -> None:
        tokens, found = self._tokens(12), []
        for seed in (5, 5, 6):
            model = self.make(self._build())
            torch.rand(3)  # other draws before
            model.init_dummy(seed)
            found.append(self._logits(model, tokens))
        first, again, other = found
        usable = first.isfinite().all() and 1e-3 < first.std() < 1e3
        assert usable, f"logits must have a standard deviation of 1e-3 to 1e3, got {first.std():.1e}"
        assert torch.equal(first, again), "equal seeds must give equal weights"
        assert not torch.equal(first, other), "different seeds must give different weights"

    def test_dummy_weights_are_equal_on_every_layout(self) -> None:
        tokens = self._tokens(12)

        def logits(collective: Collective | None = None) -> torch.Tensor:
            model = self.make(self._build(collective=collective))
            model.init_dummy(5)
            return self._logits(model, tokens)

        expected = logits()
        for size in self._ranks():
            for got in on_threads(size, logits):
                assert_near(got, expected, self.tolerance, f"logits over {size} ranks")

    def test_logits_are_equal_on_every_rank(self) -> None:
        tokens = self._tokens(12)
        expected = self._logits(self._model(), tokens)
        for size in self._ranks():
            by_rank = on_threads(size, lambda collective: self._logits(self._model(collective=collective), tokens))
            for got in by_rank:
                assert tuple(got.shape) == (12, self.spec().vocab), "logits must be [T, vocab] on every rank"
                assert same_bits(got, by_rank[0]), "logits must have the same bits on every rank"
                assert_near(got, expected, self.tolerance, f"logits over {size} ranks")

    def test_local_logits_are_its_columns(self) -> None:
        """The ranks' local logits cover the vocabulary; each rank's begin at the column that it returns."""
        drawn = torch.randn(5, self.spec().hidden, generator=torch.Generator().manual_seed(4))

        def work(collective: Collective) -> tuple[torch.Tensor, torch.Tensor, int]:
            model = self._model(collective=collective)
            states = drawn.to(model.build.device, model.build.dtype)
            with torch.inference_mode():
                return (model.logits(states), *model.local_logits(states))

        for size in (1, *self._ranks()):
            covered = torch.zeros(self.spec().vocab, dtype=torch.bool)
            for logits, local, first in on_threads(size, work):
                place = slice(first, first + local.shape[1])
                assert local.shape[1], "local_logits must not be empty on any rank"
                assert_near(local, logits[:, place], self.tolerance, f"local_logits over {size} ranks")
                covered[place] = True
            assert covered.all(), f"no rank of {size} has local logits of token {int((~covered).nonzero()[0])}"

    def test_load_takes_weights_in_any_order(self) -> None:
        weights, tokens = self._weights(), self._tokens(12)
        found = []
        for names in (list(weights), list(weights)[::-1]):
            with poisoned_memory():
                model = self.make(self._build())
                model.load(opened({name: weights[name] for name in names}))
            found.append(self._logits(model, tokens))
        assert found[0].isfinite().all(), "load left some weights unset"
        assert same_bits(*found), "the result must not depend on the order of the checkpoint"

    def test_every_weight_counts(self) -> None:
        """A tensor without effect was loaded into the wrong parameter or not at all."""
        weights, tokens = self._weights(), self._tokens(24)
        expected = self._logits(self._loaded(weights), tokens)
        for name, tensor in weights.items():
            changed = {**weights, name: tensor + torch.randn(tensor.shape).to(tensor.dtype)}
            got = self._logits(self._loaded(changed), tokens)
            used = name in self.idle or not torch.allclose(got, expected, rtol=0, atol=1e-7)
            assert used, f"checkpoint tensor {name} has no effect on the logits (list it in `idle` if intended)"

    def test_load_names_missing_and_unexpected_tensors(self) -> None:
        weights = dict(self._weights())
        missing, unexpected = sorted(weights)[:: len(weights) - 1][:2], ["stray.weight", "another.bias"]
        for name in missing:
            del weights[name]
        weights |= {name: torch.zeros(2, 2) for name in unexpected}
        with pytest.raises(ConfigError) as error:
            self._loaded(weights)
        for name in (*missing, *unexpected):
            assert name in str(error.value), f"the error must name {name}: {error.value}"

    def test_headers_are_checked_without_a_device(self) -> None:
        """`check_checkpoint` is called on a model on the meta device. A model without one refuses nothing."""
        weights = self._weights()
        model = self.make(self._build(device="meta"))
        model.check_checkpoint(_Headers(weights))
        if type(model).check_checkpoint is Model.check_checkpoint:
            return
        for name, tensor in weights.items():
            others = {other: each for other, each in weights.items() if other != name}
            wide, whole = torch.cat((tensor, tensor[:1])), torch.zeros(tensor.shape, dtype=torch.int32)
            faults = [others, {**weights, name: wide}, {**weights, name: whole}]
            if not any(part in name for part in self.ignored):
                faults.append({**weights, f"{name}.more": wide})
            for fault in faults:
                with pytest.raises(ConfigError) as error:
                    model.check_checkpoint(_Headers(fault))
                named = name in str(error.value) and "memory" in str(error.value)
                assert named, f"the error must name the tensor {name} and the file: {error.value}"

    def test_parameters_count_the_checkpoint(self) -> None:
        counted = self.spec().parameters
        if counted is None:
            pytest.skip("spec.parameters is None")
        held = sum(tensor.numel() for tensor in self._weights().values())
        assert counted.total == held, f"spec.parameters.total is {counted.total}, but the checkpoint has {held}"

    def _loaded(self, weights: Weights) -> Model:
        model = self.make(self._build())
        model.load(opened(weights))
        return model

    def _weights(self) -> Weights:
        weights = self.checkpoint()
        if weights is None:
            pytest.skip("checkpoint() is None")
        return weights

    def _ranks(self) -> tuple[int, ...]:
        if not self.ranks:
            pytest.skip("ranks = ()")
        return self.ranks


def opened(weights: Weights) -> Iterator[tuple[str, Callable[[], Lazy]]]:
    for name, tensor in weights.items():
        yield name, partial(Lazy, tensor)
