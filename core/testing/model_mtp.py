"""Part of the contract suite for models: the layer for multi-token prediction. Shapes: T tokens, C channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import (
    BuildContext,
    Collective,
    ForwardContext,
    Hidden,
    Model,
    ModelSource,
    ModelSpec,
    MTPLayer,
    TargetView,
)
from dovetail.core.testing.model_driver import Driver
from dovetail.core.testing.model_weights import Weights, opened
from dovetail.core.testing.numeric import assert_near
from dovetail.core.testing.rank_threads import on_threads

FIRST_GROUP = 5


class MTPTests:
    """Tests that ModelContract inherits, for models with ModelSpec.mtp. It has the meaning and defaults of the
    settings."""

    tolerance: float
    ranks: tuple[int, ...]

    def spec(self) -> ModelSpec:
        raise NotImplementedError

    def checkpoint(self) -> Weights | None:
        raise NotImplementedError

    def mtp_weights(self) -> Weights | None:
        """Return random tensors of the layer, without copies of the model's; None = it has dummy weights."""
        return None

    def make(self, build: BuildContext) -> Model:
        raise NotImplementedError

    def _build(self, **options: Any) -> BuildContext:
        raise NotImplementedError

    def _tokens(self, count: int) -> list[int]:
        raise NotImplementedError

    def test_the_mtp_layer_is_a_model_of_one_layer(self) -> None:
        layer, spec = self._mtp(), self._predictor()
        groups = layer.kv_groups
        assert spec.layers == 1, f"spec.mtp must describe one layer, not {spec.layers}"
        assert [group.id for group in groups] == [FIRST_GROUP], "its KV group must have the id build.first_group"
        assert len(groups[0].layers) == 1, f"its KV group must have one layer, got {groups[0].layers}"
        ids = {group.id for group in self._bare().kv_groups}
        assert FIRST_GROUP not in ids, f"the model's own KV groups must not include the layer's: {ids}"
        if (weights := self.mtp_weights()) is not None and spec.parameters is not None:
            held, counted = sum(tensor.numel() for tensor in weights.values()), spec.parameters.total
            assert counted == held, f"spec.mtp.parameters.total is {counted}, but the layer has {held}"

    def test_chunks_do_not_matter_to_the_mtp_layer(self) -> None:
        tokens, layer = self._tokens(20), self._mtp()
        whole_TC = self._states(layer, [tokens])
        for chunk in (1, 7):
            parts = [tokens[at : at + chunk] for at in range(0, len(tokens), chunk)]
            assert_near(self._states(layer, parts), whole_TC, self.tolerance, f"states in chunks of {chunk} tokens")

    def test_the_mtp_layer_reads_token_and_state(self) -> None:
        """A token's output depends on its embedding, on the state before it, and on earlier tokens."""
        tokens, layer = self._tokens(12), self._mtp()
        before_TC = self._states(layer, [tokens])
        other = [(tokens[0] + 1) % self.spec().vocab, *tokens[1:]]
        changes = {
            "the embeddings": self._states(layer, [tokens], embeds_factor=-1.0),
            "the states": self._states(layer, [tokens], states_factor=-1.0),
            "the first token": self._states(layer, [other]),
        }
        for what, after_TC in changes.items():
            same = torch.allclose(after_TC[-1], before_TC[-1], rtol=1e-4, atol=1e-6)
            assert not same, f"the state of the last token does not depend on {what}"

    def test_the_mtp_layer_is_equal_on_every_rank(self) -> None:
        tokens = self._tokens(12)
        expected_TC = self._states(self._mtp(), [tokens])

        def work(collective: Collective) -> torch.Tensor:
            return self._states(self._mtp(collective=collective), [tokens])

        for size in self.ranks:
            for got_TC in on_threads(size, work):
                assert_near(got_TC, expected_TC, self.tolerance, f"states over {size} ranks")

    def test_every_weight_of_the_mtp_layer_counts(self) -> None:
        """The layer needs each of its tensors, none is without effect, and the model needs none of them."""
        self._predictor()
        own, rest, tokens = self.mtp_weights(), self.checkpoint(), self._tokens(24)
        if own is None or rest is None:
            pytest.skip("mtp_weights() or checkpoint() is None")
        self._bare().load(opened(rest))
        expected_TC = self._states(self._mtp(), [tokens])
        with pytest.raises(ConfigError):
            self._layer_of(self._bare()).load(opened(rest))
        for name, tensor in own.items():
            changed = {**own, name: tensor + torch.randn(tensor.shape).to(tensor.dtype)}
            layer = self._layer_of(self._bare())
            layer.load(opened({**rest, **changed}))
            used = not torch.allclose(self._states(layer, [tokens]), expected_TC, rtol=0, atol=1e-7)
            assert used, f"tensor {name} of the layer has no effect on its states"
            fewer = {**rest, **{other: tensor for other, tensor in own.items() if other != name}}
            with pytest.raises(ConfigError) as error:
                self._layer_of(self._bare()).load(opened(fewer))
            assert name in str(error.value), f"the error must name the missing tensor {name}: {error.value}"

    def _bare(self, **options: Any) -> Model:
        """Return the model without weights."""
        return self.make(self._build(**options))

    def _predictor(self) -> ModelSpec:
        if (spec := self.spec().mtp) is None:
            pytest.skip("spec.mtp = None: no layer for multi-token prediction")
        return spec

    def _mtp(self, **options: Any) -> MTPLayer:
        """Return the layer with the weights of `mtp_weights`, or with dummy weights."""
        self._predictor()
        layer, own = self._layer_of(self._bare(**options)), self.mtp_weights()
        if own is None:
            layer.init_dummy(1)
        else:
            layer.load(opened({**(self.checkpoint() or {}), **own}))
        return layer

    def _layer_of(self, model: Model) -> MTPLayer:
        build = model.build
        view = TargetView(build, ModelSource(None), 1, build.max_len, FIRST_GROUP, model.embed, model.logits)
        return model.mtp_layer(view.build_context(self._predictor(), build.quantizer))

    def _states(
        self,
        layer: MTPLayer,
        chunks: Sequence[Sequence[int]],
        embeds_factor: float = 1.0,
        states_factor: float = 1.0,
    ) -> torch.Tensor:
        """Return states_TC of a sequence, whose embeddings and states before depend on its tokens alone."""
        spec = self.spec()
        generator = torch.Generator().manual_seed(6)
        pair = torch.randn(2, spec.vocab, spec.hidden, generator=generator)
        tables = {"embeds": pair[0] * embeds_factor, "states": pair[1] * states_factor}
        driver = Driver(_Standing(layer, tables))  # type: ignore[arg-type]
        return torch.cat([driver.step([("a", chunk)])[0] for chunk in chunks])


class _Standing:
    """The layer in a model's place, for a driver: its embeddings and states are looked up, and its logits are the
    states that it returns."""

    def __init__(self, layer: MTPLayer, tables: Mapping[str, torch.Tensor]) -> None:
        self.layer, self.build, self.kv_groups = layer, layer.build, layer.kv_groups
        build: BuildContext = layer.build
        self._tables = {name: table.to(build.device, build.dtype) for name, table in tables.items()}

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        return tokens_T

    def forward(self, tokens_T: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...]) -> Hidden:
        embeds_TC, states_TC = (self._tables[name][tokens_T.long()] for name in ("embeds", "states"))
        return Hidden(self.layer.forward(embeds_TC, states_TC, ctx), {})

    def logits(self, states_TC: torch.Tensor) -> torch.Tensor:
        return states_TC
