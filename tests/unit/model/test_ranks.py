"""Numbers of ranks that can share a model, and the errors for the others."""

import math
from collections import Counter

import pytest
import torch

from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.compose import Host, compose
from dovetail.core.errors import CapabilityError, ConfigError
from dovetail.core.host import model_facts
from dovetail.core.interfaces import ModelSpec
from dovetail.core.layers import ColumnParallel
from dovetail.core.layers.embedding import VocabTable
from dovetail.core.layers.share import fewer_ranks
from dovetail.core.ops import encode
from dovetail.core.testing.model_driver import Alone, build_context
from dovetail.plugins.model.llama.decoder import Llama
from dovetail.plugins.model.llama.families import spec_of
from dovetail.plugins.quant.config import FP8Config, Int8Config
from dovetail.plugins.quant.fp8.quantizer import FP8
from dovetail.plugins.quant.int8.quantizer import Int8

BUNDLED = "they share 8 heads, 4 kv heads, 688 MLP channels", (1, 2, 4, 8)
LLAMA3_70B = "they share 64 heads, 8 kv heads, 28672 MLP channels", (1, 2, 4, 8, 16, 32, 64)


class Rank(Alone):
    def __init__(self, size, rank=0):
        super().__init__(None)
        self.rank, self.size = rank, size


def check(model, tp):
    """Check a composition as at start-up."""
    composition = compose([f"model={model}", f"engine.tp={tp}", "executor=multiproc"], app="generate")
    composition.check(Host(), model_facts(spec_of(composition.part("model").config)))


@pytest.mark.parametrize(
    ("model", "tp", "told"),
    [("tiny", 3, BUNDLED), ("tiny", 16, BUNDLED), ("llama3_70b", 6, LLAMA3_70B), ("llama3_70b", 128, LLAMA3_70B)],
)
def test_ranks_that_cannot_share_the_model_are_refused_with_those_that_can(model, tp, told):
    shapes, ranks = told
    with pytest.raises(CapabilityError) as caught:
        check(model, tp)
    (conflict,) = caught.value.conflicts
    assert f"({shapes}); engine has {tp}." in conflict
    assert conflict.endswith(f"Would work: {' or '.join(f'engine.tp={n}' for n in ranks)}.")
    for n in ranks:
        check(model, n)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "intermediate", "ranks"),
    [
        (12, 6, 48, [1, 2, 3, 6, 12]),  # 4 divides heads and channels, and 6 kv heads go neither into it nor it into 6
        (12, 1, 48, [1, 2, 3, 4, 6, 12]),
        (12, 12, 50, [1, 2]),
        (71, 1, 18176, [1, 71]),
    ],
)
def test_heads_kv_heads_and_channels_all_count(heads, kv_heads, intermediate, ranks):
    spec = ModelSpec("any", 10, 1, 8 * heads, heads, kv_heads, 8, intermediate, 16, "float32")
    assert list(spec.shares()) == ranks


def build(quantizer, tp, rank=0):
    config = compose(["model=tiny"], app="generate").part("model").config
    return Llama(config, build_context(spec_of(config), quantizer=quantizer, collective=Rank(tp, rank)))


@pytest.mark.parametrize(
    ("kind", "options", "works"), [(Int8, Int8Config, [1, 2]), (FP8, FP8Config, [1])], ids=["int8", "fp8"]
)
def test_a_quantizer_refuses_shares_with_what_would_work(kind, options, works):
    for tp in (1, 2, 4, 8):
        if tp in works:
            build(kind(options()), tp)
            continue
        with pytest.raises(CapabilityError) as caught:
            build(kind(options(skip=("layers.9.*",))), tp)
        (told,) = caught.value.conflicts
        ranks = " or ".join(f"engine.tp={n}" for n in works)
        assert ": layers.0.mlp." in told
        assert told.endswith(f"Would work: {ranks}, quant.skip=['layers.9.*', 'layers.*.mlp.*'], quant=none")
        build(kind(options(skip=("layers.9.*", "layers.*.mlp.*"))), tp)


def test_fewer_ranks_than_now_are_proposed():
    spec = ModelSpec("any", 208, 1, 64, 4, 4, 16, 64, 16, "float32")
    found = {tp: fewer_ranks(build_context(spec, collective=Rank(tp))) for tp in (1, 2, 4)}
    assert found[1] == {}, "what fails now does not work with as many ranks"
    assert set(found[2]) == {1} and set(found[4]) == {1, 2}


@pytest.mark.parametrize(("vocab", "tp", "rows"), [(208, 1, 208), (208, 2, 112), (209, 1, 224), (209, 2, 112)])
def test_logits_in_fp8_serve_any_vocabulary(vocab, tp, rows):
    """A rank's rows are filled up to a multiple of 16."""
    spec = ModelSpec("any", vocab, 1, 64, 4, 4, 16, 64, 16, "float32")
    build = build_context(spec, quantizer=FP8(FP8Config(head="fp8")), collective=Rank(tp))
    table = VocabTable("lm_head", build, vocab, 64, lookup=False, logits=True)
    assert table.method.input.dtype is torch.float8_e4m3fn
    assert table.params["weight"].shape == (rows, 64) and table.params["scale"].shape == (rows,)
    x = torch.randn(3, 64)
    logits = table.method.apply(
        table.params, encode(x, (table.method.input,))[table.method.input], torch.zeros(table.rows)
    )
    assert logits.shape == (3, table.rows) and logits.is_contiguous()


def test_logits_of_channels_that_do_not_fit_are_refused_with_what_would_work():
    spec = ModelSpec("any", 208, 1, 72, 4, 4, 18, 64, 16, "float32")
    build = build_context(spec, quantizer=FP8(FP8Config(head="fp8")))
    with pytest.raises(CapabilityError, match=r"lm_head has 72 inputs, .* work: quant\.head=auto$"):
        VocabTable("lm_head", build, 208, 72, lookup=False, logits=True)


class Read:
    """A checkpoint's tensor that records which elements were read."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.numbers_N = torch.empty(0, dtype=torch.int64)

    def get_shape(self):
        return self.tensor.get_shape()

    def __getitem__(self, index):
        shape = self.get_shape()
        read = torch.arange(math.prod(shape)).view(shape)[index]
        self.numbers_N = torch.cat((self.numbers_N, read.flatten()))
        return self.tensor[index]


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("quantizer", [None, Int8(Int8Config(skip=("layers.*.mlp.*",)))], ids=["none", "int8"])
def test_ranks_read_a_matrix_once_between_them_and_a_kv_head_once_for_each_that_has_it(quantizer, tp):
    """Files are sliced before they are read, so eight ranks do not read them eight times."""
    shares = Counter()
    for rank in range(tp):
        tensors = {}

        def source(tensors=tensors):
            for name, opener in open_checkpoint("pkg://dovetail.plugins.model.bundled/tiny").open():
                yield name, lambda name=name, opener=opener: tensors.setdefault(name, Read(opener()))

        build(quantizer, tp, rank).load(source())
        for name, tensor in tensors.items():
            read, shape = len(tensor.numbers_N), tensor.get_shape()
            assert len(tensor.numbers_N.unique()) == read, f"rank {rank} reads some of {name} twice"
            if len(shape) > 1:
                shares[name] += read / math.prod(shape)
    heads = {name: max(1, tp / 4) for name in shares if ".k_proj." in name or ".v_proj." in name}
    assert heads and shares == pytest.approx(dict.fromkeys(shares, 1) | heads)


SPEC = ModelSpec("any", 10, 1, 6, 8, 8, 4, 48, 16, "float32")
"""8 heads and 48 channels allow 1, 2, 4 and 8 ranks."""


def test_channels_that_do_not_divide_are_told_with_the_ranks_that_would():
    context = build_context(SPEC, collective=Rank(8))
    with pytest.raises(ConfigError, match=r"engine\.tp=8 .* the 20 channels of up\. Set engine\.tp to one of 1, 2, 4$"):
        ColumnParallel("layers.0.mlp.up", ("up",), context, 6, (20,))
