"""Contract suite for models. Authors subclass:

class TestMine(ModelContract):
    def spec(self):
        return MyModel.spec(TINY)

    def make(self, build):
        return MyModel(TINY, build)

with a config TINY of a few layers and a few thousand weights. Everything runs in float32 with the reference attention,
so that the same tokens must give the same logits in any batch.

Shapes: T tokens, B rows, C channels, V vocabulary.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import (
    BuildContext,
    ForwardContext,
    Hidden,
    Model,
    ModelSpec,
)
from dovetail.core.testing.host_sync import NoHostSync
from dovetail.core.testing.model_doubles import OverwritesOutputs, SpyAttention, TaggingQuantizer, WatchedCollective
from dovetail.core.testing.model_driver import Driver, build_context
from dovetail.core.testing.model_mtp import MTPTests
from dovetail.core.testing.model_weights import Weights, WeightTests, opened
from dovetail.core.testing.numeric import assert_near, fresh, same_bits, seed_note
from dovetail.core.worker.two_batch_overlap import OverlappedForward

__all__ = ["ModelContract", "Weights"]

MAX_LEN = 48
PAGE_TOKENS = 4


class ModelContract(WeightTests, MTPTests):
    """Tests of the rules in dovetail.core.interfaces.model that a model must follow."""

    device = "cpu"
    """Device to test on, for instance "cuda"."""
    tolerance = 1e-4
    """Maximum difference of a row's float32 logits, relative to their norm, between two batches."""
    ranks: tuple[int, ...] = (2,)
    """Tensor-parallel sizes that the tiny model supports; () = none."""
    positional = True
    """Whether the model has a position encoding."""
    idle: tuple[str, ...] = ()
    """Names of checkpoint tensors that may have no effect."""
    ignored: tuple[str, ...] = ()
    """Parts of names that mark tensors the model does not read, wherever in a name they are."""
    seed: int | None = None
    """Random seed of tokens; None = a fresh one for each test. A failure names the seed to set here."""

    def make(self, build: BuildContext) -> Model:
        """Return the model without weights."""
        raise NotImplementedError("return your model: MyModel(TINY, build)")

    def spec(self) -> ModelSpec:
        """Return the spec: MyModel.spec(TINY)."""
        raise NotImplementedError("return your model's spec: MyModel.spec(TINY)")

    def checkpoint(self) -> Weights | None:
        """Return random tensors for a full checkpoint of the tiny model; None skips the tests of `load`."""
        return None

    def config(self, folder: str) -> Any:
        """Return the component's config for a model folder; None skips the tests of reading folders."""
        return None

    # Spec, config and KV groups

    def test_spec_is_plain_and_complete(self) -> None:
        spec = self.spec()
        for name in ("vocab", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "max_len"):
            value = getattr(spec, name)
            positive = isinstance(value, int) and not isinstance(value, bool) and value > 0
            assert positive, f"spec.{name} must be a positive int, got {value!r}"
        assert spec.heads % spec.kv_heads == 0, f"heads {spec.heads} must divide by kv_heads {spec.kv_heads}"
        assert spec.dtype in ("bfloat16", "float16", "float32"), f"spec.dtype must name a dtype, got {spec.dtype!r}"
        assert len(spec.windows) in (0, spec.layers), f"spec.windows needs 0 or {spec.layers} entries: {spec.windows}"
        assert all(0 <= id < spec.vocab for id in spec.eos_ids), f"eos_ids must be below {spec.vocab}: {spec.eos_ids}"
        assert spec == self.spec(), "two calls of spec must return equal specs"

    def test_model_keeps_its_build_and_config(self) -> None:
        build = self._build()
        model = self.make(build)
        assert model.build is build, "model.build must be the BuildContext it was made with"
        assert type(model).spec(model.config) == self.spec(), "spec(model.config) must be the spec of the model"

    def test_spec_comes_from_config_json(self) -> None:
        """A missing key is either optional, or the error names the key and config.json."""
        content = self.spec().hf
        with tempfile.TemporaryDirectory() as folder:
            config, model_class = self._folder(folder)
            assert content is not None, "spec.hf must hold the contents of config.json"
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(dict(content)))
            assert model_class.spec(config).hf == content, "spec.hf must hold the contents of config.json"
            checkpoint = model_class.source(config).checkpoint
            assert checkpoint is not None and checkpoint.path == Path(folder), "source(config) must have the folder"
            needed = []
            for key in content:
                file.write_text(json.dumps({name: value for name, value in content.items() if name != key}))
                try:
                    model_class.spec(config)
                except ConfigError as error:
                    named = key in str(error) and "config.json" in str(error)
                    assert named, f"the error for a missing key must name {key} and config.json: {error}"
                    needed.append(key)
            assert needed, "spec accepted config.json without any of its keys"

    def test_the_error_names_a_missing_folder(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            config, model_class = self._folder(str(Path(folder) / "absent"))
            for read in (model_class.spec, model_class.source):
                with pytest.raises(ConfigError, match="absent"):
                    read(config)

    def test_kv_groups_have_each_layer_once(self) -> None:
        spec, build = self.spec(), self._build()
        groups = self.make(build).kv_groups
        layers = sorted(layer for group in groups for layer in group.layers)
        assert layers == list(range(spec.layers)), f"each of {spec.layers} layers must be in one KV group, got {layers}"
        assert len({group.id for group in groups}) == len(groups), "KV groups must have distinct ids"
        windows = spec.windows or (0,) * spec.layers
        for group in groups:
            assert group.page_tokens == build.page_tokens, f"page_tokens must be {build.page_tokens} in {group}"
            if group.kind == "mla":
                continue
            kind = "window" if group.window else "full"
            assert group.kind == kind, f"a group with window {group.window} must have kind {kind!r}, not {group.kind!r}"
            expected = {windows[layer] for layer in group.layers}
            assert expected == {group.window}, f"spec.windows gives {expected} for the layers of {group}"
            plane = ((spec.kv_heads, spec.head_dim), build.kv_dtype)
            found = {(plane.shape, plane.dtype) for plane in group.planes if plane.name in ("k", "v")}
            assert found <= {plane}, f"K and V must have (shape, dtype) {plane}, got {found}"

    def test_attention_is_called_with_the_groups_layers(self) -> None:
        """Attention runs once per layer, with the index, heads and window of its KV group."""
        spec, spy = self.spec(), SpyAttention()
        model = self._model(attention=spy)
        Driver(model).step([("a", self._tokens(9))])
        called = sorted(layer.index for layer in spy.seen)
        assert called == list(range(spec.layers)), f"attention must run once for each layer, ran for {called}"
        groups = {group.id: group for group in model.kv_groups}
        for layer in spy.seen:
            group = groups[layer.group]
            assert group.layers[layer.local] == layer.index, f"`local` must be the index in {group.layers}: {layer}"
            assert layer.window == group.window, f"`window` must be that of {group}: {layer}"
            expected = (spec.heads, spec.kv_heads, spec.head_dim)
            assert (layer.heads, layer.kv_heads, layer.head_dim) == expected, f"heads must be the spec's: {layer}"

    def test_linear_layers_use_the_quantizer(self) -> None:
        """Each linear layer asks for a method by a unique path and feeds it the format it declares."""
        tokens, spy = self._tokens(20), TaggingQuantizer()
        expected, got = self._logits(self._model(), tokens), self._logits(self._model(quantizer=spy), tokens)
        least = self.spec().layers
        assert len(spy.paths) >= least, f"at least {least} linear layers must ask the quantizer, got {spy.paths}"
        assert len(set(spy.paths)) == len(spy.paths), f"paths must be unique, got {sorted(spy.paths)}"
        assert spy.applied == set(spy.paths), f"methods never applied: {sorted(set(spy.paths) - spy.applied)}"
        assert_near(got, expected, self.tolerance, "logits with another input format")

    # Forward

    @pytest.mark.parametrize("chunk", (1, 5, 16))
    def test_chunks_do_not_matter(self, chunk: int) -> None:
        """Logits are equal for one chunk, several chunks and single tokens, up to the last position."""
        tokens = self._tokens(MAX_LEN)
        expected = self._logits(self._model(), tokens)
        assert expected.isfinite().all(), "logits must be finite"
        driver, found = Driver(self._model()), []
        for start in range(0, len(tokens), chunk):
            rows = [("a", tokens[start : start + chunk])]
            found += driver.step(rows, num_decode=int(chunk == 1 and start > 0), slack=3)
        assert_near(torch.cat(found), expected, self.tolerance, f"logits in chunks of {chunk}")

    def test_rows_do_not_see_each_other(self) -> None:
        """Prompts, chunks and decode rows in one step with padding give the logits of each sequence alone."""
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
            assert_near(torch.cat(parts), expected[name], self.tolerance, f"logits of sequence {name} in a batch")

    def test_tokens_see_only_earlier_tokens(self) -> None:
        tokens = self._tokens(24)
        changed = [*tokens[:12], *((token + 1) % self.spec().vocab for token in tokens[12:])]
        model = self._model()
        first, second = self._logits(model, tokens), self._logits(model, changed)
        assert_near(second[:12], first[:12], self.tolerance, "logits before the first changed token")
        again = self._logits(model, [(tokens[0] + 1) % self.spec().vocab, *tokens[1:]])
        assert not torch.allclose(again[-1], first[-1], rtol=0, atol=1e-6), "the last token must depend on the first"

    def test_positions_are_the_steps(self) -> None:
        """A token's position may differ from its index in the KV cache: policies that drop tokens leave gaps."""
        if not self.positional:
            pytest.skip("positional = False")
        tokens, model = self._tokens(12), self._model()
        found: list[torch.Tensor] = []
        for gap in (0, 7):
            driver = Driver(model, pages=MAX_LEN)
            driver.step([("a", tokens[:-1])])
            found += driver.step([("a", tokens[-1:])], num_decode=1, gap=gap)
        here, further = found
        same = torch.allclose(here, further, rtol=0, atol=1e-7)
        assert not same, f"the model must use ctx.positions_T, but a position 7 higher changes nothing ({seed_note()})"

    def test_nothing_stays_between_steps(self) -> None:
        """A model keeps the state of a sequence in its pages alone."""
        tokens, model = self._tokens(20), self._model()
        expected = self._logits(model, tokens)
        self._logits(model, self._tokens(33))
        assert_near(self._logits(model, tokens), expected, self.tolerance, "logits after another sequence")

    def test_forward_does_not_wait_for_the_device(self) -> None:
        """Otherwise its steps cannot be captured as CUDA graphs, which `capturable` says."""
        model = self._model()
        if not model.capturable:
            pytest.skip("capturable = False")
        driver = Driver(model)

        def forward(*args: Any) -> Hidden:
            with NoHostSync("forward"):
                return model.forward(*args)

        driver.forward = forward
        driver.step([("a", self._tokens(9))])
        driver.step([("a", self._tokens(1))], num_decode=1)

    # Taps

    def test_taps_are_given_when_asked(self) -> None:
        tokens, last = self._tokens(9), self.spec().layers - 1
        for taps in ((), (0,), (last,), tuple(range(last + 1))):
            driver = Driver(self._model())
            driver.step([("a", tokens)], taps=taps)
            assert set(driver.hidden.taps) == set(taps), f"expected taps {taps}, got {tuple(driver.hidden.taps)}"
            for tap in driver.hidden.taps.values():
                assert tap.shape == (len(tokens), self.spec().hidden), "a tap must be [T, hidden]"

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
        """If the KV cache of one layer is NaN, that layer's tap is the first with NaN."""
        every, tokens = tuple(range(self.spec().layers)), self._tokens(9)
        for bad in every:
            driver = Driver(self._model())
            driver.step([("a", tokens[:-1])])
            group = next(group for group in driver.model.kv_groups if bad in group.layers)
            for name in driver.paging.pools[group.id].planes:
                driver.paging.pools[group.id].layer(group.layers.index(bad), name).fill_(float("nan"))
            driver.step([("a", tokens[-1:])], num_decode=1, taps=every)
            fine = [tap for tap in every if driver.hidden.taps[tap].isfinite().all()]
            assert fine == list(range(bad)), f"NaN in layer {bad}: expected finite taps {[*range(bad)]}, got {fine}"

    # Overlapped half-batches

    def test_layers_yield_every_collective_call(self) -> None:
        """Their number does not depend on the number of tokens or sequences."""
        collective = WatchedCollective(None)
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
        assert len(set(made)) == 1, f"steps of 39 and 1 tokens must make equally many collective calls, got {made}"
        expected = self._logits(model, tokens)
        assert_near(found[19:39], expected, self.tolerance, "logits of `layers`, compared with `forward`")

    def test_half_batches_equal_one_step(self) -> None:
        """A step may be cut within a chunk, between rows, or within a running sequence. Taps are equal too. The output
        of a half-batch's boundary is overwritten when its next one begins."""
        whole, halved = Driver(self._model()), Driver(self._halving(collective=OverwritesOutputs(None)))
        build = halved.model.build
        halved.forward = OverlappedForward(halved.model, build.attention, None, build.device, least=2)
        sequences = {name: self._tokens(MAX_LEN) for name in "abc"}
        last = self.spec().layers - 1
        fed = dict.fromkeys(sequences, 0)
        for counts, num_decode in (({"a": 17}, 0), ({"a": 1, "b": 5, "c": 6}, 1), ({"a": 1, "c": 1, "b": 13}, 2)):
            rows = [(name, sequences[name][fed[name] : fed[name] + count]) for name, count in counts.items()]
            expected, got = (torch.cat(d.step(rows, num_decode, slack=3, taps=(0, last))) for d in (whole, halved))
            assert_near(got, expected, self.tolerance, f"logits of {counts} in two half-batches")
            for tap in (0, last):
                what = f"tap {tap} of two half-batches"
                assert_near(halved.hidden.taps[tap], whole.hidden.taps[tap], self.tolerance, what)
            for name, count in counts.items():
                fed[name] += count

    # Embedding and logits

    def test_embed_looks_tokens_up(self) -> None:
        model, tokens = self._model(), self._tokens(9)
        tokens_T = torch.tensor(tokens, dtype=torch.int32, device=self.device)
        embeds_TC = model.embed(tokens_T)
        expected = ((9, self.spec().hidden), model.build.dtype)
        assert (embeds_TC.shape, embeds_TC.dtype) == expected, "embed must return [T, hidden] in the model's dtype"
        for token, embed_C in zip(tokens, embeds_TC, strict=True):
            alone_C = model.embed(torch.tensor([token], device=self.device))[0]
            assert torch.equal(alone_C, embed_C), f"the embedding of token {token} depends on the batch"

    def test_embed_takes_extra_rows_where_masked(self) -> None:
        model = self._model()
        tokens_T = torch.tensor(self._tokens(9), dtype=torch.int32, device=self.device)
        plain, extra = model.embed(tokens_T), torch.randn(9, self.spec().hidden).to(self.device)
        mask_T = torch.tensor([True, False, False, True, True, False, False, False, True], device=self.device)
        given = extra.clone()
        got = model.embed(tokens_T, given, mask_T)
        assert torch.equal(got[mask_T], extra[mask_T]), "masked rows must be those of extra_TC"
        assert torch.equal(got[~mask_T], plain[~mask_T]), "other rows must be the tokens' embeddings"
        assert torch.equal(given, extra), "embed must not change extra_TC"
        unmasked = model.embed(tokens_T, given, torch.zeros_like(mask_T))
        assert torch.equal(unmasked, plain), "an empty mask must give the tokens' embeddings"

    def test_logits_span_the_vocabulary(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            model = self._model(dtype=dtype)
            states = torch.randn(5, self.spec().hidden).to(dtype).to(self.device)
            before = states.clone()
            logits = model.logits(states)
            assert logits.dtype in (torch.float32, dtype), f"logits must be float32 or {dtype}, got {logits.dtype}"
            assert tuple(logits.shape) == (5, self.spec().vocab), "logits must be [T, vocab]"
            assert same_bits(states, before), "logits must not change the hidden states"
            if dtype == torch.float32:
                assert_near(model.logits(states[3:]), logits[3:], self.tolerance, "logits of fewer rows")

    # Helpers

    def _build(self, **options: Any) -> BuildContext:
        return build_context(
            self.spec(), **{"device": self.device, "page_tokens": PAGE_TOKENS, "max_len": MAX_LEN, **options}
        )

    def _model(self, **options: Any) -> Model:
        """Return the model with the checkpoint's weights, or with dummy weights if there is none."""
        model, weights = self.make(self._build(**options)), self.checkpoint()
        if weights is None:
            model.init_dummy(1)
        else:
            model.load(opened(weights))
        return model

    def _halving(self, **options: Any) -> Model:
        model = self._model(**options)
        if type(model).layers is Model.layers:
            pytest.skip("`layers` is not overridden")
        return model

    def _folder(self, folder: str) -> tuple[Any, type[Model]]:
        config = self.config(folder)
        if config is None:
            pytest.skip("config() is None")
        return config, type(self.make(self._build()))

    def _tokens(self, count: int) -> list[int]:
        fresh(self)
        return torch.randint(self.spec().vocab, (count,)).tolist()

    def _logits(self, model: Model, tokens: Sequence[int]) -> torch.Tensor:
        """Return logits_TV of one sequence fed in one step."""
        return Driver(model, pages=MAX_LEN).step([("a", tokens)])[0]
