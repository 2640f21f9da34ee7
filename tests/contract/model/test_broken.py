"""Models with one fault each; the suite must reject them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from dovetail.core.checkpoint import FolderCheckpoint
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import (
    BuildContext,
    Checkpoint,
    ForwardContext,
    Hidden,
    Layers,
    LinearMethod,
    LinearShape,
    ModelSource,
    ModelSpec,
    Quantizer,
)
from dovetail.core.testing.model import ModelContract
from dovetail.core.testing.suite import failures
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama
from dovetail.plugins.quant.config import NoneConfig
from dovetail.plugins.quant.none import Unquantized

from ..faults import each, rejects, suite, variant
from . import tiny

Weights = Iterable[tuple[str, Callable[[], Any]]]


class Sound(Llama):
    hf = tiny.LLAMA


fault = partial(variant, Sound)


def built(name: str, change: Callable[[BuildContext], BuildContext]) -> type[Sound]:
    """Model that is built in another context than the one that it states."""

    def __init__(self: Sound, config: LlamaConfig, build: BuildContext) -> None:
        Sound.__init__(self, config, change(build))
        self.build = build

    return fault(name, __init__=__init__)


def grouped(name: str, hf: dict[str, Any] = tiny.LLAMA, **changes: Any) -> type[Sound]:
    """Model with other facts in its KV groups."""
    groups = property(lambda self: tuple(replace(group, **changes) for group in Llama.kv_groups.fget(self)))
    return fault(name, hf=hf, kv_groups=groups)


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
        return ModelSource(None if config.path is None else FolderCheckpoint(Path(config.path)))


class ForgetsItsBuild(Sound):
    def __init__(self, config: LlamaConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.build = replace(build)


class NamesEveryLayerAlike(Quantizer):
    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        return self.config.linear("layers.mlp", shape)  # type: ignore[attr-defined]


class MixesRows(Sound):
    def forward(self, embeds_TC: torch.Tensor, *rest: Any) -> Hidden:
        hidden = super().forward(embeds_TC, *rest)
        return replace(hidden, states=hidden.states + 0.01 * embeds_TC.mean(0))


def positioned(name: str, positions: Callable[[torch.Tensor], torch.Tensor]) -> type[Sound]:
    """Model that gives attention other positions than the step's."""

    def forward(self: Sound, embeds_TC: torch.Tensor, ctx: ForwardContext, *rest: Any) -> Hidden:
        for attn in ctx.attn.values():
            attn.meta = replace(attn.meta, positions_T=positions(ctx.positions_T))
        return Sound.forward(self, embeds_TC, ctx, *rest)

    return fault(name, forward=forward)


class RemembersTheStepBefore(Sound):
    before: torch.Tensor | float = 0.0

    def forward(self, embeds_TC: torch.Tensor, *rest: Any) -> Hidden:
        hidden = super().forward(embeds_TC + self.before, *rest)
        self.before = 0.01 * embeds_TC.mean(0)
        return hidden


class ReadsAPosition(Sound):
    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, *rest: Any) -> Hidden:
        assert int(ctx.positions_T.max()) < self.build.max_len
        return super().forward(embeds_TC, ctx, *rest)


class TapsBeforeTheLayer(Sound):
    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        hidden = super().forward(embeds_TC, ctx, tuple(tap - 1 for tap in taps))
        return replace(hidden, taps={tap: hidden.taps.get(tap - 1, embeds_TC) for tap in taps})


class TapsChangeItsStates(Sound):
    def forward(self, *args: Any) -> Hidden:
        hidden = super().forward(*args)
        return replace(hidden, states=hidden.states + 0.01 * sum(hidden.taps.values()))


class GivesTheLastTapForAll(Sound):
    def forward(self, *args: Any) -> Hidden:
        hidden = super().forward(*args)
        return replace(hidden, taps=dict.fromkeys(hidden.taps, hidden.taps[max(hidden.taps)]) if hidden.taps else {})


class ReducesByItself(Sound):
    def layers(self, *args: Any) -> Layers:
        hidden = yield from super().layers(*args)
        return replace(hidden, states=self.build.collective.reduce(hidden.states))


class CallsOnceMoreForManyTokens(Sound):
    def layers(self, embeds_TC: torch.Tensor, *rest: Any) -> Layers:
        if len(embeds_TC) > 16:
            embeds_TC = yield lambda: self.build.collective.reduce(embeds_TC)
        return (yield from super().layers(embeds_TC, *rest))


class KeepsItsTokensOnTheModel(Sound):
    def layers(self, embeds_TC: torch.Tensor, *rest: Any) -> Layers:
        self.last_C = embeds_TC[-1]
        hidden = yield from super().layers(embeds_TC, *rest)
        return replace(hidden, states=torch.cat((hidden.states[:-1], (hidden.states[-1] + self.last_C)[None])))


class OverridesForwardAlone(Sound):
    def forward(self, *args: Any) -> Hidden:
        hidden = super().forward(*args)
        return replace(hidden, states=hidden.states * 1.1)


class WritesIntoExtra(Sound):
    def embed(self, tokens_T, extra_TC=None, mask_T=None):  # type: ignore[no-untyped-def]
        embeds_TC = super().embed(tokens_T)
        if mask_T is None:
            return embeds_TC
        extra_TC[~mask_T] = embeds_TC[~mask_T]
        return extra_TC


class CentersLogitsOverTheBatch(Sound):
    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        logits_BV = super().logits(states_BC)
        return logits_BV - logits_BV.mean(0)


class GivesItsRanksShare(Sound):
    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        return super().logits(states_BC).chunk(self.build.collective.size, dim=-1)[self.build.collective.rank]


class RoundsOnOneRank(Sound):
    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        logits_BV = super().logits(states_BC)
        return logits_BV.bfloat16().float() if self.build.collective.rank else logits_BV


class LosesALastToken(Sound):
    def local_logits(self, states_BC: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits_BV, first = super().local_logits(states_BC)
        return logits_BV[:, :-1], first


class TakesQueriesAndOutputsAsTheyCome(Sound):
    def load(self, weights: Weights) -> None:
        arrived: dict[str, int] = {}

        def renamed() -> Weights:
            for name, opener in weights:
                layer, _, last = name.rpartition(".self_attn.")
                if last in ("q_proj.weight", "o_proj.weight"):
                    arrived[layer] = arrived.get(layer, 0) + 1
                    name = f"{layer}.self_attn.{'_qo'[arrived[layer]]}_proj.weight"
                yield name, opener

        super().load(renamed())


class LoadsGateTwice(Sound):
    def load(self, weights: Weights) -> None:
        openers = dict(weights)
        super().load((name, openers.get(name.replace("up_proj", "gate_proj"), openers[name])) for name in openers)


class LeavesANormUnset(Sound):
    def load(self, weights: Weights) -> None:
        kept = self.norm.weight.clone()
        super().load(weights)
        self.norm.weight.copy_(kept)


class AcceptsAnyCheckpoint(Sound):
    def load(self, weights: Weights) -> None:
        with suppress(ConfigError):
            super().load(weights)


class ComplainsOfMissingAlone(Sound):
    def load(self, weights: Weights) -> None:
        try:
            super().load(weights)
        except ConfigError as error:
            raise ConfigError(str(error).split("unexpected")[0]) from None


class ChecksNothing(Sound):
    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        with suppress(ConfigError):
            super().check_checkpoint(checkpoint)


class ReadsWhatItChecks(Sound):
    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.load(checkpoint.open())


BROKEN: dict[str, list[type[Sound]]] = {
    "test_spec_is_plain_and_complete": [
        fault("CountsItsWindowsWrong", spec=classmethod(lambda cls, config: replace(Llama.spec(config), windows=(0,))))
    ],
    "test_parameters_count_the_checkpoint": [CountsTooFewParameters],
    "test_headers_are_checked_without_a_device": [ChecksNothing, ReadsWhatItChecks],
    "test_spec_comes_from_config_json": [TrustsItsConfig],
    "test_the_error_names_a_missing_folder": [TrustsItsFolder],
    "test_model_keeps_its_build_and_config": [ForgetsItsBuild],
    "test_kv_groups_have_each_layer_once": [
        grouped("HasNoCacheForItsLastLayer", layers=(0, 1)),
        grouped("HasPagesOfItsOwn", page_tokens=16),
        built("CachesInFloat32", lambda build: replace(build, kv_dtype=torch.float64)),
        grouped("CallsAWindowFull", tiny.MISTRAL, kind="full", window=0),
    ],
    "test_attention_is_called_with_the_groups_layers": [grouped("PlacesLayersBackwards", layers=(2, 1, 0))],
    "test_linear_layers_use_the_quantizer": [
        built("QuantizesNothing", lambda build: replace(build, quantizer=Unquantized(NoneConfig()))),
        built("NamesEveryLayerAlike", lambda build: replace(build, quantizer=NamesEveryLayerAlike(build.quantizer))),
    ],
    "test_rows_do_not_see_each_other": [MixesRows],
    "test_tokens_see_only_earlier_tokens": [
        fault(
            "SeesTheNextToken",
            forward=lambda self, embeds_TC, *rest: Sound.forward(self, embeds_TC + 0.01 * embeds_TC.roll(-1, 0), *rest),
        )
    ],
    "test_chunks_do_not_matter": [
        positioned("CountsFromTheChunk", lambda positions_T: torch.arange(len(positions_T))),
        built("HasOnePositionTooFew", lambda build: replace(build, max_len=build.max_len - 1)),
    ],
    "test_positions_are_the_steps": [positioned("HasNoPositions", torch.zeros_like)],
    "test_nothing_stays_between_steps": [RemembersTheStepBefore],
    "test_forward_does_not_wait_for_the_device": [ReadsAPosition],
    "test_a_tap_comes_after_its_layer": [TapsBeforeTheLayer],
    "test_taps_are_given_when_asked": [
        fault(
            "GivesEveryTap",
            forward=lambda self, embeds_TC, ctx, taps=(): Sound.forward(
                self, embeds_TC, ctx, tuple(range(self.build.spec.layers))
            ),
        )
    ],
    "test_taps_change_nothing": [TapsChangeItsStates, GivesTheLastTapForAll],
    "test_layers_yield_every_collective_call": [ReducesByItself, CallsOnceMoreForManyTokens],
    "test_half_batches_equal_one_step": [KeepsItsTokensOnTheModel, OverridesForwardAlone],
    "test_embed_looks_tokens_up": [
        fault(
            "EmbedsByPlace",
            embed=lambda self, tokens_T, *extra: (
                Sound.embed(self, tokens_T, *extra) + torch.arange(len(tokens_T))[:, None]
            ),
        )
    ],
    "test_embed_takes_extra_rows_where_masked": [
        fault("IgnoresExtra", embed=lambda self, tokens_T, *extra: Sound.embed(self, tokens_T)),
        fault(
            "TakesExtraWhereNotMasked",
            embed=lambda self, tokens_T, extra_TC=None, mask_T=None: Sound.embed(
                self, tokens_T, extra_TC, None if mask_T is None else ~mask_T
            ),
        ),
        WritesIntoExtra,
    ],
    "test_logits_span_the_vocabulary": [
        fault("AnswersInHalf", logits=lambda self, states_BC: Sound.logits(self, states_BC).half()),
        fault("PadsItsVocabulary", logits=lambda self, states_BC: F.pad(Sound.logits(self, states_BC), (0, 5))),
        CentersLogitsOverTheBatch,
        fault("NormsStatesInPlace", logits=lambda self, states_BC: Sound.logits(self, states_BC.mul_(0.5))),
    ],
    "test_logits_are_equal_on_every_rank": [GivesItsRanksShare, RoundsOnOneRank],
    "test_local_logits_are_its_columns": [
        fault(
            "BeginsAtTheFirstToken", local_logits=lambda self, states_BC: (Sound.local_logits(self, states_BC)[0], 0)
        ),
        LosesALastToken,
    ],
    "test_dummy_weights_depend_on_the_seed_alone": [
        fault("IgnoresTheSeed", init_dummy=lambda self, seed: Sound.init_dummy(self, 0)),
        fault(
            "DrawsWithoutTheSeed",
            init_dummy=lambda self, seed: Sound.init_dummy(self, seed + int(torch.randint(1000, ()))),
        ),
    ],
    "test_dummy_weights_are_equal_on_every_layout": [
        fault(
            "DrawsForItsRank", init_dummy=lambda self, seed: Sound.init_dummy(self, seed + self.build.collective.rank)
        )
    ],
    "test_load_takes_weights_in_any_order": [TakesQueriesAndOutputsAsTheyCome, LeavesANormUnset],
    "test_every_weight_counts": [LoadsGateTwice],
    "test_load_names_missing_and_unexpected_tensors": [AcceptsAnyCheckpoint, ComplainsOfMissingAlone],
}


def suite_of(model: type[Sound]) -> ModelContract:
    config = LlamaConfig(hf=model.hf, load="dummy")
    return suite(
        ModelContract,
        spec=lambda self: model.spec(config),
        make=lambda self, build: model(config, build),
        checkpoint=lambda self: tiny.checkpoint(model.hf),
        config=lambda self, folder: LlamaConfig(path=folder),
    )


@each(BROKEN)
def test_the_suite_rejects(broken: type[Sound], test: str) -> None:
    assert rejects(suite_of(broken), test)


def test_the_sound_one_passes() -> None:
    assert failures(suite_of(Sound)) == {}
