"""The merged q|k|v layer: which rows of which checkpoint matrix each rank takes, and in which order."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from dovetail.core.interfaces import LinearMethod, ModelSpec
from dovetail.core.interfaces.tensor_record import Axis, TensorRecord
from dovetail.core.layers import PlainLinear, QKVParallel, load_weights
from dovetail.core.testing.model_driver import Alone, build_context

from .lazy import Lazy

SPEC = ModelSpec("any", 10, 1, 6, 4, 2, 4, 8, 16, "float32")
HEADS, KV_HEADS, DIM = 4, 2, 4


class Rank(Alone):
    def __init__(self, rank, size):
        super().__init__(None)
        self.rank, self.size = rank, size


class Quantizer:
    def __init__(self, method: Callable[[], LinearMethod]) -> None:
        self.method = method

    def linear(self, path, shape):
        return self.method()


def layer(names, rank=0, size=1, method=PlainLinear, **options):
    context = build_context(SPEC, collective=Rank(rank, size), quantizer=Quantizer(method))
    return QKVParallel("layers.0.attn.qkv", names, context, 6, HEADS, KV_HEADS, DIM, **options)


def load(layer, **tensors):
    """Load tensors that are named part_name."""
    load_weights(layer.weights(), ((name.replace("_", ".", 1), partial(Lazy, t)) for name, t in tensors.items()))
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
    some = load(layer(("q", "k", "v"), interleaved=2), q_weight=q, k_weight=kv, v_weight=kv)
    assert heads(some, some.params["weight"]) == rows(0, 1, 2, 3, 0, 1, 0, 1)


class Scaled(PlainLinear):
    """Reads scales of groups of `group` outputs; 0 = of all."""

    def __init__(self, group: int) -> None:
        self.tensors = (TensorRecord("scale", (Axis("outputs", group), Axis("nothing"))),)

    def load(self, params, part, tensors):
        params.setdefault("scales", {})[part.start] = tensors["scale"].flatten().tolist()


def test_scales_follow_their_rows():
    matrix = torch.arange(32.0)[:, None]
    by_row = load(layer(("qkv",), method=partial(Scaled, 1)), qkv_scale=matrix).params["scales"]
    assert by_row[16] == [8, 9, 10, 11, 24, 25, 26, 27] and len(by_row[0]) == 16
    one = load(layer(("qkv",), method=partial(Scaled, 0)), qkv_scale=matrix[:1]).params["scales"]
    assert {start: (len(scale), set(scale)) for start, scale in one.items()} == {
        0: (16, {0.0}),
        16: (8, {0.0}),
        24: (8, {0.0}),
    }


def test_rows_of_a_block_keep_its_scale():
    """Rank 1 of 2 has rows 8 to 15 of q, whose pairs become halves: 0, 2, 1, 3 of each head. Blocks have 3 rows."""
    blocks = {name: torch.arange(-(-rows // 3) * 1.0)[:, None] for name, rows in (("q", 16), ("k", 8), ("v", 8))}
    made = layer(("q", "k", "v"), rank=1, size=2, interleaved=4, method=partial(Scaled, 3))
    scales = load(made, **{f"{name}_scale": scale for name, scale in blocks.items()}).params["scales"]
    assert scales[0] == [row // 3 for head in (2, 3) for row in (4 * head + at for at in (0, 2, 1, 3))]
    assert scales[12] == [row // 3 for row in (4, 5, 6, 7)]
