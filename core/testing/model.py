"""The contract of Model as tests. Authors subclass:

class TestMine(ModelContract):
    def spec(self):
        return MyModel.spec(TINY)

    def make(self, build):
        return MyModel(TINY, build)

with a config TINY of a few layers and a few thousand weights. Everything runs in float32 over the reference attention,
so that the same tokens must give the same logits however they are fed.

Shapes: T tokens, B rows, C channels, V vocabulary.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import (
    PLAIN,
    ActFormat,
    Activation,
    AttentionBackend,
    AttentionLayer,
    AttnCtx,
    BuildContext,
    Bundle,
    Collective,
    ForwardContext,
    Hidden,
    LinearMethod,
    LinearShape,
    Model,
    ModelSpec,
    Partial,
    Quantizer,
    Residual,
)
from dovetail.core.testing.model_driver import Alone, Driver, Lazy, build_context
from dovetail.core.testing.numeric import assert_near, fresh, poisoned_memory, same_bits, seed_note
from dovetail.core.testing.rank_threads import on_threads
from dovetail.core.testing.reference import build as build_component
from dovetail.core.worker.two_batch_overlap import OverlappedForward

__all__ = ["ModelContract"]

MAX_LEN = 48
PAGE_TOKENS = 4

Weights = Mapping[str, torch.Tensor]
"""A whole checkpoint by name."""


class ModelContract:
    """Every sentence of dovetail.core.interfaces.model that a model must keep."""

    device = "cpu"
    """Where it runs, such as "cuda"."""
    tolerance = 1e-4
    """Greatest difference of a row's logits in float32, relative to their norm, between two ways of feeding it."""
    ranks: tuple[int, ...] = (2,)
    """Sizes of tensor parallelism that the tiny model divides by; () = it has none."""
    positional = True
    """False: it has no position encoding."""
    idle: tuple[str, ...] = ()
    """Names of checkpoint tensors that may have no effect."""
    seed: int | None = None
    """None = fresh random tokens each time; a failure names the seed to set here."""

    def make(self, build: BuildContext) -> Model:
        """The model, without weights."""
        raise NotImplementedError("return your model: MyModel(TINY, build)")

    def spec(self) -> ModelSpec:
        """Its spec: MyModel.spec(TINY)."""
        raise NotImplementedError("return your model's spec: MyModel.spec(TINY)")

    def checkpoint(self) -> Weights | None:
        """Every tensor that a checkpoint of the tiny model holds, random; None leaves `load` untested."""
        return None

    def config(self, folder: str) -> Any:
        """The component's config for a model folder; None leaves the reading of folders untested."""
        return None

    # Facts.

    def test_spec_is_plain_and_complete(self) -> None:
        spec = self.spec()
        for name in ("vocab", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "max_len"):
            value = getattr(spec, name)
            assert isinstance(value, int) and not isinstance(value, bool) and value > 0, f"{name} is {value!r}"
        assert spec.heads % spec.kv_heads == 0
        assert spec.dtype in ("bfloat16", "float16", "float32"), f"dtype is {spec.dtype!r}"
        assert len(spec.windows) in (0, spec.layers), f"{len(spec.windows)} windows for {spec.layers} layers"
        assert all(0 <= id < spec.vocab for id in spec.eos_ids), f"eos_ids {spec.eos_ids} of {spec.vocab}"
        assert spec == self.spec(), "a second reading gives another spec"

    def test_model_keeps_its_build_and_config(self) -> None:
        build = self._build()
        model = self.make(build)
        assert model.build is build
        assert type(model).spec(model.config) == self.spec()

    def test_spec_comes_from_config_json(self) -> None:
        """Any key that is missing is either not needed, or named together with its file."""
        content = self.spec().hf
        with tempfile.TemporaryDirectory() as folder:
            config, model_class = self._folder(folder)
            assert content is not None, "the spec keeps config.json as `hf`"
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(dict(content)))
            assert model_class.spec(config).hf == content
            assert model_class.source(config).folder == Path(folder)
            needed = []
            for key in content:
                file.write_text(json.dumps({name: value for name, value in content.items() if name != key}))
                try:
                    model_class.spec(config)
                except ConfigError as error:
                    assert key in str(error) and "config.json" in str(error), f"without {key}: {error}"
                    needed.append(key)
            assert needed, "config.json may be empty?"

    def test_a_folder_that_is_not_there_is_named(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            config, model_class = self._folder(str(Path(folder) / "absent"))
            for read in (model_class.spec, model_class.source):
                with pytest.raises(ConfigError, match="absent"):
                    read(config)

    def test_kv_groups_have_each_layer_once(self) -> None:
        spec, build = self.spec(), self._build()
        groups = self.make(build).kv_groups
        layers = sorted(layer for group in groups for layer in group.layers)
        assert layers == list(range(spec.layers)), f"layers {layers} have KV groups, the model has {spec.layers}"
        assert len({group.id for group in groups}) == len(groups), "two KV groups have one id"
        windows = spec.windows or (0,) * spec.layers
        for group in groups:
            assert group.page_tokens == build.page_tokens
            if group.kind == "mla":
                continue
            assert group.kind == ("window" if group.window else "full"), (
                f"a {group.kind} group of window {group.window}"
            )
            assert {windows[layer] for layer in group.layers} == {group.window}
            for plane in group.planes:
                if plane.name in ("k", "v"):
                    assert (plane.shape, plane.dtype) == ((spec.kv_heads, spec.head_dim), build.kv_dtype)

    def test_attention_is_asked_with_the_groups_layers(self) -> None:
        """Every layer once, with the place, heads and window that its KV group has."""
        spec, spy = self.spec(), SpyAttention()
        model = self._model(attention=spy)
        Driver(model).step([("a", self._tokens(9))])
        assert sorted(layer.index for layer in spy.seen) == list(range(spec.layers))
        groups = {group.id: group for group in model.kv_groups}
        for layer in spy.seen:
            group = groups[layer.group]
            assert group.layers[layer.local] == layer.index, f"{layer} is not at this place of its group"
            assert layer.window == group.window
            assert (layer.heads, layer.kv_heads, layer.head_dim) == (spec.heads, spec.kv_heads, spec.head_dim)

    def test_linear_layers_ask_the_quantizer(self) -> None:
        """By a path of their own, and they feed each method the format it wants."""
        tokens, spy = self._tokens(20), TaggingQuantizer()
        expected, got = self._logits(self._model(), tokens), self._logits(self._model(quantizer=spy), tokens)
        assert len(spy.paths) >= self.spec().layers, f"the quantizer was asked for {spy.paths}"
        assert len(set(spy.paths)) == len(spy.paths), "two layers have one path"
        assert spy.applied == set(spy.paths), f"never applied: {sorted(set(spy.paths) - spy.applied)}"
        assert_near(got, expected, self.tolerance, "logits with another input format")

    # Forward.

    @pytest.mark.parametrize("chunk", (1, 5, 16))
    def test_chunks_do_not_matter(self, chunk: int) -> None:
        """One chunk, several, or token by token, up to the last position."""
        tokens = self._tokens(MAX_LEN)
        expected = self._logits(self._model(), tokens)
        assert expected.isfinite().all()
        driver, found = Driver(self._model()), []
        for start in range(0, len(tokens), chunk):
            rows = [("a", tokens[start : start + chunk])]
            found += driver.step(rows, num_decode=int(chunk == 1 and start > 0), slack=3)
        assert_near(torch.cat(found), expected, self.tolerance, f"logits in chunks of {chunk}")

    def test_rows_do_not_see_each_other(self) -> None:
        """Prompts, chunks and decode rows of one step, beside padding, against each sequence alone."""
        sequences = {name: self._tokens(length) for name, length in (("a", 31), ("b", 12), ("c", 20), ("d", 1))}
        model = self._model()
        expected = {name: self._logits(model, tokens) for name, tokens in sequences.items()}
        driver, fed = Driver(model), dict.fromkeys(sequences, 0)
        found: dict[str, list[torch.Tensor]] = {name: [] for name in sequences}
        steps: Sequence[tuple[Mapping[str, int], int]] = (
            ({"a": 20, "b": 7}, 0),
            ({"b": 1, "a": 3, "c": 9}, 2),
            ({"a": 1, "b": 1, "d": 1, "c": 11}, 2),
            ({"b": 3, "a": 7}, 2),
        )
        for counts, num_decode in steps:
            rows = [(name, sequences[name][fed[name] : fed[name] + count]) for name, count in counts.items()]
            for (name, tokens), logits in zip(rows, driver.step(rows, num_decode, slack=3, padding=2), strict=True):
                fed[name] += len(tokens)
                found[name].append(logits)
        for name, parts in found.items():
            assert_near(torch.cat(parts), expected[name], self.tolerance, f"logits of {name} beside others")

    def test_tokens_see_what_came_before_alone(self) -> None:
        tokens = self._tokens(24)
        changed = [*tokens[:12], *((token + 1) % self.spec().vocab for token in tokens[12:])]
        model = self._model()
        first, second = self._logits(model, tokens), self._logits(model, changed)
        assert_near(second[:12], first[:12], self.tolerance, "logits before the change")
        again = self._logits(model, [(tokens[0] + 1) % self.spec().vocab, *tokens[1:]])
        assert not torch.allclose(again[-1], first[-1], rtol=0, atol=1e-6), "the last token does not see the first"

    def test_positions_are_the_steps(self) -> None:
        """A token's position need not be its place in the KV cache: policies that drop tokens leave gaps."""
        if not self.positional:
            pytest.skip("positional = False")
        tokens, model = self._tokens(12), self._model()
        found: list[torch.Tensor] = []
        for gap in (0, 7):
            driver = Driver(model, pages=MAX_LEN)
            driver.step([("a", tokens[:-1])])
            found += driver.step([("a", tokens[-1:])], num_decode=1, gap=gap)
        here, further = found
        assert not torch.allclose(here, further, rtol=0, atol=1e-7), (
            f"a position 7 further on is the same ({seed_note()})"
        )

    def test_nothing_stays_between_steps(self) -> None:
        """What a model knows of a sequence stands in its pages."""
        tokens, model = self._tokens(20), self._model()
        expected = self._logits(model, tokens)
        self._logits(model, self._tokens(33))
        assert_near(self._logits(model, tokens), expected, self.tolerance, "logits after other work")

    # Taps.

    def test_taps_are_given_when_asked(self) -> None:
        tokens, last = self._tokens(9), self.spec().layers - 1
        for taps in ((), (0,), (last,), tuple(range(last + 1))):
            driver = Driver(self._model())
            driver.step([("a", tokens)], taps=taps)
            assert set(driver.hidden.taps) == set(taps), f"asked for {taps}, got {tuple(driver.hidden.taps)}"
            for tap in driver.hidden.taps.values():
                assert tap.shape == (len(tokens), self.spec().hidden)

    def test_taps_change_nothing(self) -> None:
        tokens, every = self._tokens(9), tuple(range(self.spec().layers))
        whole = Driver(self._model())
        tapped = whole.step([("a", tokens)], taps=every)[0]
        assert_near(tapped, self._logits(self._model(), tokens), self.tolerance, "logits of a tapped forward")
        for tap in every:
            alone = Driver(self._model())
            alone.step([("a", tokens)], taps=(tap,))
            assert_near(alone.hidden.taps[tap], whole.hidden.taps[tap], self.tolerance, f"tap {tap} alone")

    def test_a_tap_comes_after_its_layer(self) -> None:
        """With the KV cache of one layer gone bad, that layer's tap is the first to show it."""
        every, tokens = tuple(range(self.spec().layers)), self._tokens(9)
        for bad in every:
            driver = Driver(self._model())
            driver.step([("a", tokens[:-1])])
            group = next(group for group in driver.model.kv_groups if bad in group.layers)
            for name in driver.paging.pools[group.id].planes:
                driver.paging.pools[group.id].layer(group.layers.index(bad), name).fill_(float("nan"))
            driver.step([("a", tokens[-1:])], num_decode=1, taps=every)
            fine = [tap for tap in every if driver.hidden.taps[tap].isfinite().all()]
            assert fine == list(range(bad)), f"layer {bad} is bad; taps {fine} did not see it"

    # In turns.

    def test_layers_hand_out_every_collective_call(self) -> None:
        """As many for one token as for many, of one sequence and of two."""
        collective = Handed(None)
        model = self._halving(collective=collective)
        made: list[int] = []

        def forward(embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...]) -> Hidden:
            collective.forbidden = True
            layers, calls, given = model.layers(embeds_TC, ctx, taps), 0, None
            try:
                while True:
                    call = layers.send(given)
                    collective.forbidden, calls = False, calls + 1
                    given, collective.forbidden = call(), True
            except StopIteration as end:
                made.append(calls)
                return end.value
            finally:
                collective.forbidden = False

        tokens = self._tokens(20)
        driver = Driver(model)
        driver.forward = forward
        found = torch.cat([*driver.step([("a", tokens[:-1]), ("b", tokens)]), *driver.step([("a", tokens[-1:])])])
        assert len(set(made)) == 1, f"{made} collective calls in steps of 39 and 1 tokens"
        expected = self._logits(model, tokens)
        assert_near(found[19:39], expected, self.tolerance, "logits of `layers`, beside those of `forward`")

    def test_halves_in_turns_are_one_step(self) -> None:
        """Cut within a chunk, between rows, within a sequence that was there before; taps, too. What a half's boundary
        gave is gone when its next one begins."""
        whole, halved = Driver(self._model()), Driver(self._halving(collective=TwoPlaces(None)))
        build = halved.model.build
        halved.forward = OverlappedForward(halved.model, build.attention, None, build.device, least=2)
        sequences = {name: self._tokens(MAX_LEN) for name in "abc"}
        last = self.spec().layers - 1
        fed = dict.fromkeys(sequences, 0)
        for counts, num_decode in (({"a": 17}, 0), ({"a": 1, "b": 5, "c": 6}, 1), ({"a": 1, "c": 1, "b": 13}, 2)):
            rows = [(name, sequences[name][fed[name] : fed[name] + count]) for name, count in counts.items()]
            expected, got = (torch.cat(d.step(rows, num_decode, slack=3, taps=(0, last))) for d in (whole, halved))
            assert_near(got, expected, self.tolerance, f"logits of {counts} in two halves")
            for tap in (0, last):
                assert_near(halved.hidden.taps[tap], whole.hidden.taps[tap], self.tolerance, f"tap {tap} of halves")
            for name, count in counts.items():
                fed[name] += count

    # Embedding and logits.

    def test_embed_looks_tokens_up(self) -> None:
        model, tokens = self._model(), self._tokens(9)
        tokens_T = torch.tensor(tokens, dtype=torch.int32, device=self.device)
        embeds_TC = model.embed(tokens_T)
        assert (embeds_TC.shape, embeds_TC.dtype) == ((9, self.spec().hidden), model.build.dtype)
        for token, embed_C in zip(tokens, embeds_TC, strict=True):
            assert torch.equal(model.embed(torch.tensor([token], device=self.device))[0], embed_C)

    def test_embed_takes_extra_rows_where_masked(self) -> None:
        model = self._model()
        tokens_T = torch.tensor(self._tokens(9), dtype=torch.int32, device=self.device)
        plain, extra = model.embed(tokens_T), torch.randn(9, self.spec().hidden).to(self.device)
        mask_T = torch.tensor([True, False, False, True, True, False, False, False, True], device=self.device)
        given = extra.clone()
        got = model.embed(tokens_T, given, mask_T)
        assert torch.equal(got[mask_T], extra[mask_T]), "masked rows are those of extra"
        assert torch.equal(got[~mask_T], plain[~mask_T]), "other rows are the tokens'"
        assert torch.equal(given, extra), "embed changed extra"
        assert torch.equal(model.embed(tokens_T, given, torch.zeros_like(mask_T)), plain)

    def test_logits_span_the_vocabulary(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            model = self._model(dtype=dtype)
            states = torch.randn(5, self.spec().hidden).to(dtype).to(self.device)
            before = states.clone()
            logits = model.logits(states)
            assert logits.dtype in (torch.float32, dtype)
            assert tuple(logits.shape) == (5, self.spec().vocab)
            assert same_bits(states, before), "logits changed the states"
            if dtype == torch.float32:
                assert_near(model.logits(states[3:]), logits[3:], self.tolerance, "logits of fewer rows")

    # Weights.

    def test_dummy_weights_depend_on_the_seed_alone(self) -> None:
        tokens, found = self._tokens(12), []
        for seed in (5, 5, 6):
            model = self.make(self._build())
            torch.rand(3)  # whatever else was drawn before
            model.init_dummy(seed)
            found.append(self._logits(model, tokens))
        first, again, other = found
        assert first.isfinite().all() and 1e-3 < first.std() < 1e3, f"logits deviate by {first.std():.1e}"
        assert torch.equal(first, again), "the same seed gave other weights"
        assert not torch.equal(first, other), "another seed gave the same weights"

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
                assert tuple(got.shape) == (12, self.spec().vocab)
                assert same_bits(got, by_rank[0]), "two ranks have different logits"
                assert_near(got, expected, self.tolerance, f"logits over {size} ranks")

    def test_local_logits_are_its_columns(self) -> None:
        """Side by side they are the whole, each rank's at the place that it says."""
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
                assert local.shape[1], "a rank without logits has nothing to draw from"
                assert_near(local, logits[:, place], self.tolerance, f"local_logits over {size} ranks")
                covered[place] = True
            assert covered.all(), f"no rank of {size} has logits of token {int((~covered).nonzero()[0])}"

    def test_load_takes_weights_in_any_order(self) -> None:
        weights, tokens = self._weights(), self._tokens(12)
        found = []
        for names in (list(weights), list(weights)[::-1]):
            with poisoned_memory():
                model = self.make(self._build())
                model.load(opened({name: weights[name] for name in names}))
            found.append(self._logits(model, tokens))
        assert found[0].isfinite().all(), "a weight was never set"
        assert same_bits(*found), "the result depends on the order of the checkpoint"

    def test_every_weight_counts(self) -> None:
        """A tensor that changes nothing was read into the wrong place, or not at all."""
        weights, tokens = self._weights(), self._tokens(24)
        expected = self._logits(self._loaded(weights), tokens)
        for name, tensor in weights.items():
            changed = {**weights, name: tensor + torch.randn(tensor.shape).to(tensor.dtype)}
            got = self._logits(self._loaded(changed), tokens)
            assert name in self.idle or not torch.allclose(got, expected, rtol=0, atol=1e-7), f"{name} has no effect"

    def test_load_names_all_that_does_not_fit(self) -> None:
        weights = dict(self._weights())
        missing, unexpected = sorted(weights)[:: len(weights) - 1][:2], ["stray.weight", "another.bias"]
        for name in missing:
            del weights[name]
        weights |= {name: torch.zeros(2, 2) for name in unexpected}
        with pytest.raises(ConfigError) as error:
            self._loaded(weights)
        for name in (*missing, *unexpected):
            assert name in str(error.value), f"the error does not name {name}: {error.value}"

    def test_parameters_count_the_checkpoint(self) -> None:
        counted = self.spec().parameters
        if counted is None:
            pytest.skip("the spec counts no parameters")
        held = sum(tensor.numel() for tensor in self._weights().values())
        assert counted.total == held, f"the spec counts {counted.total} parameters, the checkpoint holds {held}"

    # Tools.

    def _build(self, **options: Any) -> BuildContext:
        return build_context(
            self.spec(), **{"device": self.device, "page_tokens": PAGE_TOKENS, "max_len": MAX_LEN, **options}
        )

    def _model(self, **options: Any) -> Model:
        """With the checkpoint's weights, where there is one."""
        model, weights = self.make(self._build(**options)), self.checkpoint()
        if weights is None:
            model.init_dummy(1)
        else:
            model.load(opened(weights))
        return model

    def _halving(self, **options: Any) -> Model:
        model = self._model(**options)
        if type(model).layers is Model.layers:
            pytest.skip("it has no `layers`")
        return model

    def _loaded(self, weights: Weights) -> Model:
        model = self.make(self._build())
        model.load(opened(weights))
        return model

    def _weights(self) -> Weights:
        weights = self.checkpoint()
        if weights is None:
            pytest.skip("checkpoint() gives no weights")
        return weights

    def _folder(self, folder: str) -> tuple[Any, type[Model]]:
        config = self.config(folder)
        if config is None:
            pytest.skip("config() gives no config for a folder")
        return config, type(self.make(self._build()))

    def _ranks(self) -> tuple[int, ...]:
        if not self.ranks:
            pytest.skip("ranks = ()")
        return self.ranks

    def _tokens(self, count: int) -> list[int]:
        fresh(self)
        return torch.randint(self.spec().vocab, (count,)).tolist()

    def _logits(self, model: Model, tokens: Sequence[int]) -> torch.Tensor:
        """logits_TV of a whole sequence in one step, over pages of its own."""
        return Driver(model, pages=MAX_LEN).step([("a", tokens)])[0]


def opened(weights: Weights) -> Iterator[tuple[str, Callable[[], Lazy]]]:
    for name, tensor in weights.items():
        yield name, partial(Lazy, tensor)


class Handed(Alone):
    """One rank, which knows when it must not be called."""

    forbidden = False

    def boundary(self, *args: Any) -> tuple[Bundle, torch.Tensor]:
        self._check()
        return super().boundary(*args)

    def reduce(self, x: torch.Tensor | Partial) -> torch.Tensor:
        self._check()
        return super().reduce(x)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._check()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._check()
        return x

    def whole(self, residual: Residual) -> torch.Tensor:
        self._check()
        return super().whole(residual)

    def _check(self) -> None:
        assert not self.forbidden, "`layers` makes a collective call by itself"


class TwoPlaces(Alone):
    """One rank, with memory for what two sums are made to, as one whose ranks copy has (`Collective.overlapped`)."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.given: list[Bundle] = []

    def boundary(self, x: torch.Tensor | Partial, *args: Any) -> tuple[Bundle, torch.Tensor]:
        if self.overlapped and isinstance(x, Partial):
            for item in self.given[-2].items if len(self.given) > 1 else ():
                item.values.fill_(float("nan"))
        bundle, residual = super().boundary(x, *args)
        if not self.overlapped:
            self.given = []
        elif isinstance(x, Partial):
            self.given = [*self.given[-1:], bundle]
        return bundle, residual


class SpyAttention(AttentionBackend):
    """The reference backend, which remembers the layers it was asked for."""

    def __init__(self) -> None:
        super().__init__(None)
        self.inner: AttentionBackend = build_component("attention", "sdpa")
        self.seen: list[AttentionLayer] = []

    def bind(self, pools: Any) -> None:
        super().bind(pools)
        self.inner.bind(pools)

    def plan_device(self, *args: Any) -> AttnCtx:
        return self.inner.plan_device(*args)

    def attend(
        self, layer: AttentionLayer, ctx: AttnCtx, q: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)
    ) -> Bundle:
        self.seen.append(layer)
        return self.inner.attend(layer, ctx, q, emit)


class TaggingQuantizer(Quantizer):
    """The plain product, from inputs in a format of its own that a producer must have been asked for."""

    def __init__(self) -> None:
        super().__init__(None)
        self.inner: Quantizer = build_component("quant", "none")
        self.paths: list[str] = []
        self.applied: set[str] = set()

    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        self.paths.append(path)
        return _Tagging(self, path, self.inner.linear(path, shape))


class _Tagging(LinearMethod):
    def __init__(self, owner: TaggingQuantizer, path: str, inner: LinearMethod) -> None:
        self.owner, self.path, self.inner = owner, path, inner
        # Halved on the way in and doubled before the product, so that plain input gives another result.
        self.input = ActFormat(f"tagged {path}", reference=lambda x: (x / 2, None))

    def create(self, shape: LinearShape, device: torch.device) -> dict[str, torch.Tensor]:
        return self.inner.create(shape, device)

    def load(self, params: dict[str, torch.Tensor], name: str, part: slice, tensor: torch.Tensor) -> None:
        self.inner.load(params, name, part, tensor)

    def finish(self, params: dict[str, torch.Tensor]) -> None:
        self.inner.finish(params)

    def apply(self, params: dict[str, torch.Tensor], x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert x.format is self.input, f"{self.path} was given {x.format.name!r}"
        self.owner.applied.add(self.path)
        return self.inner.apply(params, Activation(PLAIN, x.values * 2), bias)
