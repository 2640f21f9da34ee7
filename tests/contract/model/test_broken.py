"""Models with one fault each; the suite must reject them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import (
    BuildContext,
    ForwardContext,
    Hidden,
    KVGroup,
    Layers,
    LinearMethod,
    LinearShape,
    Model,
    ModelSource,
    ModelSpec,
    Quantizer,
)
from dovetail.core.testing.model import ModelContract, Weights
from dovetail.core.testing.suite import failures
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama
from dovetail.plugins.quant.config import NoneConfig
from dovetail.plugins.quant.none import Unquantized

from . import tiny

Source = Iterable[tuple[str, Callable[[], Any]]]


class Sound(Llama):
    hf = tiny.LLAMA


# Facts.


class CountsItsWindowsWrong(Sound):
    @classmethod
    def spec(cls, config: LlamaConfig) -> ModelSpec:
        return replace(super().spec(config), windows=(0,))


class CountsTooFewParameters(Sound):
    @classmethod
    def spec(cls, config: LlamaConfig) -> ModelSpec:
        spec = super().spec(config)
        return replace(spec, parameters=spec.parameters and replace(spec.parameters, rest=0))


class TrustsItsConfig(Sound):
    @classmethod
    def spec(cls, config: LlamaConfig) -> ModelSpec:
        if config.path is not None:
            content = json.loads((Path(config.path) / "config.json").read_text())
            assert content["hidden_size"] % content["num_attention_heads"] == 0
        return super().spec(config)


class TrustsItsFolder(Sound):
    @classmethod
    def source(cls, config: LlamaConfig) -> ModelSource:
        return ModelSource(None if config.path is None else Path(config.path))


class ForgetsItsBuild(Sound):
    def __init__(self, config: LlamaConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.build = replace(build)


class HasNoCacheForItsLastLayer(Sound):
    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        (group,) = super().kv_groups
        return (replace(group, layers=group.layers[:-1]),)


class HasPagesOfItsOwn(Sound):
    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return tuple(replace(group, page_tokens=16) for group in super().kv_groups)


class CachesInFloat32(Sound):
    def __init__(self, config: LlamaConfig, build: BuildContext) -> None:
        super().__init__(config, replace(build, kv_dtype=torch.float64))
        self.build = build


class CallsAWindowFull(Sound):
    hf = tiny.MISTRAL

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return tuple(replace(group, kind="full", window=0) for group in super().kv_groups)


class PlacesLayersBackwards(Sound):
    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return tuple(replace(group, layers=group.layers[::-1]) for group in super().kv_groups)


class QuantizesNothing(Sound):
    def __init__(self, config: LlamaConfig, build: BuildContext) -> None:
        super().__init__(config, replace(build, quantizer=Unquantized(NoneConfig())))
        self.build = build


class NamesEveryLayerAlike(Sound):
    class quantizer(Quantizer):
        def linear(self, path: str, shape: LinearShape) -> LinearMethod:
            return self.config.linear("layers.mlp", shape)  # type: ignore[attr-defined]

    def __init__(self, config: LlamaConfig, build: BuildContext) -> None:
        super().__init__(config, replace(build, quantizer=self.quantizer(build.quantizer)))
        self.build = build


# Forward.


class MixesRows(Sound):
    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        hidden = super().forward(embeds_TC, ctx, taps)
        return replace(hidden, states=hidden.states + 0.01 * embeds_TC.mean(0))


class SeesTheNextToken(Sound):
    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        return super().forward(embeds_TC + 0.01 * embeds_TC.roll(-1, 0), ctx, taps)


class CountsFromTheChunk(Sound):
    """Restarts positions with each step."""

    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        for attn in ctx.attn.values():
            attn.meta = replace(attn.meta, positions_T=torch.arange(len(embeds_TC)))
        return super().forward(embeds_TC, ctx, taps)


class HasNoPositions(Sound):
    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        for attn in ctx.attn.values():
            attn.meta = replace(attn.meta, positions_T=torch.zeros_like(ctx.positions_T))
        return super().forward(embeds_TC, ctx, taps)


class HasOnePositionTooFew(Sound):
    def __init__(self, config: LlamaConfig, build: BuildContext) -> None:
        super().__init__(config, replace(build, max_len=build.max_len - 1))
        self.build = build


class RemembersTheStepBefore(Sound):
    before: torch.Tensor | float = 0.0

    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        hidden = super().forward(embeds_TC + self.before, ctx, taps)
        self.before = 0.01 * embeds_TC.mean(0)
        return hidden


# Taps.


class TapsBeforeTheLayer(Sound):
    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        hidden = super().forward(embeds_TC, ctx, tuple(tap - 1 for tap in taps))
        return replace(hidden, taps={tap: hidden.taps.get(tap - 1, embeds_TC) for tap in taps})


class GivesEveryTap(Sound):
    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        return super().forward(embeds_TC, ctx, tuple(range(self.build.spec.layers)))


class TapsChangeItsStates(Sound):
    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        hidden = super().forward(embeds_TC, ctx, taps)
        return replace(hidden, states=hidden.states + 0.01 * sum(hidden.taps.values()))


class GivesTheLastTapForAll(Sound):
    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        hidden = super().forward(embeds_TC, ctx, taps)
        return replace(hidden, taps={tap: hidden.taps[max(taps)] for tap in taps})


# Interleaved halves.


class ReducesByItself(Sound):
    def layers(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Layers:
        hidden = yield from super().layers(embeds_TC, ctx, taps)
        return replace(hidden, states=self.build.collective.reduce(hidden.states))


class CallsOnceMoreForManyTokens(Sound):
    def layers(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Layers:
        if len(embeds_TC) > 16:
            embeds_TC = yield lambda: self.build.collective.reduce(embeds_TC)
        return (yield from super().layers(embeds_TC, ctx, taps))


class KeepsItsTokensOnTheModel(Sound):
    def layers(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Layers:
        self.last_C = embeds_TC[-1]
        hidden = yield from super().layers(embeds_TC, ctx, taps)
        return replace(hidden, states=torch.cat((hidden.states[:-1], (hidden.states[-1] + self.last_C)[None])))


class OverridesForwardAlone(Sound):
    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        hidden = super().forward(embeds_TC, ctx, taps)
        return replace(hidden, states=hidden.states * 1.1)


# Embedding and logits.


class EmbedsByPlace(Sound):
    def embed(self, tokens_T, extra_TC=None, mask_T=None):  # type: ignore[no-untyped-def]
        return super().embed(tokens_T, extra_TC, mask_T) + torch.arange(len(tokens_T))[:, None]


class IgnoresExtra(Sound):
    def embed(self, tokens_T, extra_TC=None, mask_T=None):  # type: ignore[no-untyped-def]
        return super().embed(tokens_T)


class TakesExtraWhereNotMasked(Sound):
    def embed(self, tokens_T, extra_TC=None, mask_T=None):  # type: ignore[no-untyped-def]
        return super().embed(tokens_T, extra_TC, None if mask_T is None else ~mask_T)


class WritesIntoExtra(Sound):
    def embed(self, tokens_T, extra_TC=None, mask_T=None):  # type: ignore[no-untyped-def]
        embeds_TC = super().embed(tokens_T)
        if mask_T is None:
            return embeds_TC
        extra_TC[~mask_T] = embeds_TC[~mask_T]
        return extra_TC


class AnswersInHalf(Sound):
    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        return super().logits(states_BC).half()


class PadsItsVocabulary(Sound):
    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        return F.pad(super().logits(states_BC), (0, 5))


class CentersLogitsOverTheBatch(Sound):
    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        logits_BV = super().logits(states_BC)
        return logits_BV - logits_BV.mean(0)


class NormsStatesInPlace(Sound):
    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        return super().logits(states_BC.mul_(0.5))


class GivesItsRanksShare(Sound):
    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        shares = super().logits(states_BC).chunk(self.build.collective.size, dim=-1)
        return shares[self.build.collective.rank]


class RoundsOnOneRank(Sound):
    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        logits_BV = super().logits(states_BC)
        return logits_BV.bfloat16().float() if self.build.collective.rank else logits_BV


class BeginsAtTheFirstToken(Sound):
    def local_logits(self, states_BC: torch.Tensor) -> tuple[torch.Tensor, int]:
        return super().local_logits(states_BC)[0], 0


class LosesALastToken(Sound):
    def local_logits(self, states_BC: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits_BV, first = super().local_logits(states_BC)
        return logits_BV[:, :-1], first


# Weights.


class IgnoresTheSeed(Sound):
    def init_dummy(self, seed: int) -> None:
        super().init_dummy(0)


class DrawsWithoutTheSeed(Sound):
    def init_dummy(self, seed: int) -> None:
        super().init_dummy(seed + int(torch.randint(1000, ())))


class DrawsForItsRank(Sound):
    def init_dummy(self, seed: int) -> None:
        super().init_dummy(seed + self.build.collective.rank)


class TakesQueriesAndOutputsAsTheyCome(Sound):
    def load(self, weights: Source) -> None:
        arrived: dict[str, int] = {}

        def renamed() -> Source:
            for name, opener in weights:
                layer, _, last = name.rpartition(".self_attn.")
                if last in ("q_proj.weight", "o_proj.weight"):
                    arrived[layer] = arrived.get(layer, 0) + 1
                    last = f"{'_qo'[arrived[layer]]}_proj.weight"
                    name = f"{layer}.self_attn.{last}"
                yield name, opener

        super().load(renamed())


class LoadsGateTwice(Sound):
    def load(self, weights: Source) -> None:
        openers = dict(weights)
        super().load((name, openers.get(name.replace("up_proj", "gate_proj"), openers[name])) for name in openers)


class LeavesANormUnset(Sound):
    def load(self, weights: Source) -> None:
        kept = self.norm.weight.clone()
        super().load(weights)
        self.norm.weight.copy_(kept)


class AcceptsAnyCheckpoint(Sound):
    def load(self, weights: Source) -> None:
        try:
            super().load(weights)
        except ConfigError:
            pass


class ComplainsOfMissingAlone(Sound):
    def load(self, weights: Source) -> None:
        try:
            super().load(weights)
        except ConfigError as error:
            raise ConfigError(str(error).split("unexpected")[0]) from None


BROKEN: dict[type[Sound], str] = {
    CountsItsWindowsWrong: "test_spec_is_plain_and_complete",
    CountsTooFewParameters: "test_parameters_count_the_checkpoint",
    TrustsItsConfig: "test_spec_comes_from_config_json",
    TrustsItsFolder: "test_the_error_names_a_missing_folder",
    ForgetsItsBuild: "test_model_keeps_its_build_and_config",
    HasNoCacheForItsLastLayer: "test_kv_groups_have_each_layer_once",
    HasPagesOfItsOwn: "test_kv_groups_have_each_layer_once",
    CachesInFloat32: "test_kv_groups_have_each_layer_once",
    CallsAWindowFull: "test_kv_groups_have_each_layer_once",
    PlacesLayersBackwards: "test_attention_is_called_with_the_groups_layers",
    QuantizesNothing: "test_linear_layers_use_the_quantizer",
    NamesEveryLayerAlike: "test_linear_layers_use_the_quantizer",
    MixesRows: "test_rows_do_not_see_each_other",
    SeesTheNextToken: "test_tokens_see_only_earlier_tokens",
    CountsFromTheChunk: "test_chunks_do_not_matter",
    HasNoPositions: "test_positions_are_the_steps",
    HasOnePositionTooFew: "test_chunks_do_not_matter",
    RemembersTheStepBefore: "test_nothing_stays_between_steps",
    TapsBeforeTheLayer: "test_a_tap_comes_after_its_layer",
    GivesEveryTap: "test_taps_are_given_when_asked",
    TapsChangeItsStates: "test_taps_change_nothing",
    GivesTheLastTapForAll: "test_taps_change_nothing",
    ReducesByItself: "test_layers_yield_every_collective_call",
    CallsOnceMoreForManyTokens: "test_layers_yield_every_collective_call",
    KeepsItsTokensOnTheModel: "test_half_batches_equal_one_step",
    OverridesForwardAlone: "test_half_batches_equal_one_step",
    EmbedsByPlace: "test_embed_looks_tokens_up",
    IgnoresExtra: "test_embed_takes_extra_rows_where_masked",
    TakesExtraWhereNotMasked: "test_embed_takes_extra_rows_where_masked",
    WritesIntoExtra: "test_embed_takes_extra_rows_where_masked",
    AnswersInHalf: "test_logits_span_the_vocabulary",
    PadsItsVocabulary: "test_logits_span_the_vocabulary",
    CentersLogitsOverTheBatch: "test_logits_span_the_vocabulary",
    NormsStatesInPlace: "test_logits_span_the_vocabulary",
    GivesItsRanksShare: "test_logits_are_equal_on_every_rank",
    BeginsAtTheFirstToken: "test_local_logits_are_its_columns",
    LosesALastToken: "test_local_logits_are_its_columns",
    RoundsOnOneRank: "test_logits_are_equal_on_every_rank",
    IgnoresTheSeed: "test_dummy_weights_depend_on_the_seed_alone",
    DrawsWithoutTheSeed: "test_dummy_weights_depend_on_the_seed_alone",
    DrawsForItsRank: "test_dummy_weights_are_equal_on_every_layout",
    TakesQueriesAndOutputsAsTheyCome: "test_load_takes_weights_in_any_order",
    LoadsGateTwice: "test_every_weight_counts",
    LeavesANormUnset: "test_load_takes_weights_in_any_order",
    AcceptsAnyCheckpoint: "test_load_names_missing_and_unexpected_tensors",
    ComplainsOfMissingAlone: "test_load_names_missing_and_unexpected_tensors",
}


def suite_of(model: type[Sound]) -> ModelContract:
    config = LlamaConfig(hf=model.hf, load="dummy")

    class Suite(ModelContract):
        def spec(self) -> ModelSpec:
            return model.spec(config)

        def make(self, build: BuildContext) -> Model:
            return model(config, build)

        def checkpoint(self) -> Weights:
            return tiny.checkpoint(model.hf)

        def config(self, folder: str) -> LlamaConfig:
            return LlamaConfig(path=folder)

    return Suite()


@pytest.mark.parametrize(("broken", "test"), BROKEN.items(), ids=[broken.__name__ for broken in BROKEN])
def test_the_suite_rejects(broken: type[Sound], test: str) -> None:
    suite = suite_of(broken)
    assert test in failures(suite, skip=tuple(name for name in dir(suite) if name != test)), broken.__doc__


def test_the_sound_one_passes() -> None:
    assert failures(suite_of(Sound)) == {}
