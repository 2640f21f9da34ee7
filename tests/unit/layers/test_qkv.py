"""The merged q|k|v layer: which rows of which checkpoint matrix each rank takes, and in which order."""

import pytest
import torch

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import LinearMethod, ModelSpec
from dovetail.core.layers import PlainLinear, QKVParallel
from dovetail.core.testing.model_driver import Alone, build_context

from .lazy import Lazy

SPEC = ModelSpec("any", 10, 1, 6, 4, 2, 4, 8, 16, "float32")
HEADS, KV_HEADS, DIM = 4, 2, 4


class Rank(Alone):
    def __init__(self, rank, size):
        super().__init__(None)
        self.rank, self.size = rank, size


class Quantizer:
    def __init__(self, method: type[LinearMethod]) -> None:
        self.method = method

    def linear(self, path, shape):
        return self.method()


def layer(names, rank=0, size=1, method=PlainLinear, **options):
    context = build_context(SPEC, collective=Rank(rank, size), quantizer=Quantizer(method))
    return QKVParallel("layers.0.attn.qkv", names, context, 6, HEADS, KV_HEADS, DIM, **options)


def load(layer, **tensors):
    for weight in layer.weights():
        source, _, name = weight.name.partition(".")
        assert weight.shape is None or weight.shape == tuple(tensors[f"{source}_{name}"].shape)
        weight.take(Lazy(tensors[f"{source}_{name}"]))
    return layer


def heads(layer, tensor):
    """First column of every row of a weight or a bias, by head."""
    return tensor.view(-1, DIM, tensor[0].numel())[..., 0].tolist()


def rows(*heads_):
    return [[10.0 * head + dim for dim in range(DIM)] for head in heads_]


def numbered(count):
    """Matrix whose rows encode their head and dimension."""
    return torch.tensor(rows(*range(count))).flatten()[:, None].expand(-1, 6).contiguous()


@pytest.mark.parametrize(
    ("rank", "size", "expected"),
    [(0, 1, rows(0, 1, 4, 5, 2, 6, 3, 7)), (1, 2, rows(4, 5, 6, 7)), (1, 4, rows(1, 2, 3)), (2, 4, rows(4, 6, 7))],
)
def test_one_matrix_of_groups(rank, size, expected):
    """Falcon: two query heads, key and value of kv head 0, then those of kv head 1."""
    matrix = numbered(HEADS + 2 * KV_HEADS)
    qkv = load(layer(("qkv",), rank, size, bias=True), qkv_weight=matrix, qkv_bias=matrix[:, 0])
    assert heads(qkv, qkv.params["weight"]) == expected
    assert heads(qkv, qkv.bias) == expected


def test_neighbouring_pairs_become_halves():
    """The first dimensions of q and k are reordered; v and the rest of a head are unchanged."""
    q, kv = numbered(HEADS), numbered(KV_HEADS)
    qkv = load(layer(("q", "k", "v"), rank=1, size=2, interleaved=4), q_weight=q, k_weight=kv, v_weight=kv)
    turned = [0, 2, 1, 3]
    assert heads(qkv, qkv.params["weight"]) == [
        *([10.0 * head + dim for dim in turned] for head in (2, 3)),
        [10.0 + dim for dim in turned],
        [10.0 + dim for dim in range(DIM)],
    ]
    partial = load(layer(("q", "k", "v"), interleaved=2), q_weight=q, k_weight=kv, v_weight=kv)
    assert heads(partial, partial.params["weight"]) == rows(0, 1, 2, 3, 0, 1, 0, 1)


class Scaled(PlainLinear):
    tensors = ("scale",)

    def load(self, params, name, part, tensor):
        params.setdefault("parts", []).append((part.start, tensor.shape[0]))


def test_scales_follow_their_rows():
    matrix = torch.arange(32.0)[:, None]
    by_row = load(layer(("qkv",), method=Scaled), qkv_scale=matrix)
    assert by_row.params["parts"] == [(0, 16), (16, 8), (24, 8)]
    one = load(layer(("qkv",), method=Scaled), qkv_scale=matrix[:1])
    assert one.params["parts"] == [(0, 1), (16, 1), (24, 1)]


def test_scales_of_blocks_cannot_be_reordered():
    with pytest.raises(ConfigError, match="q has one entry per block of 4 rows, but the layer reorders rows"):
        load(layer(("q", "k", "v"), method=Scaled, interleaved=4), q_scale=torch.ones(4, 1))
