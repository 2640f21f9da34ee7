"""Loading of checkpoint tensors into layers."""

import pytest
import torch

from dovetail.core.errors import ConfigError
from dovetail.core.layers import Weight, dummy_weights, load_weights
from dovetail.core.layers.linear import local_heads

from .lazy import Lazy

CPU = torch.device("cpu")


def source(**tensors):
    return [(name.replace("__", "."), lambda tensor=tensor: Lazy(tensor)) for name, tensor in tensors.items()]


def weight(name, shape=(2,), taken=None, init="normal"):
    return Weight(name, lambda lazy: taken.append(lazy[:]) if taken is not None else None, shape, init)


def test_missing_and_unexpected_names_are_both_listed():
    with pytest.raises(ConfigError, match=r"1 missing \('b'\); 1 unexpected \('c'\)"):
        load_weights([weight("a"), weight("b")], source(a=torch.ones(2), c=torch.ones(2)))


def test_left_overs_may_be_ignored_by_their_end():
    load_weights([weight("a")], source(a=torch.ones(2), x__inv_freq=torch.ones(1)), ignore=(".inv_freq",))


def test_a_wrong_shape_names_both():
    with pytest.raises(ConfigError, match=r"'a' has shape \(3,\).*\(2,\)"):
        load_weights([weight("a")], source(a=torch.ones(3)))


def test_dummies_depend_on_name_and_seed_alone():
    def draw(seed, *names):
        taken = []
        weights = [weight(name, (50, 40), taken) for name in names]
        load_weights(weights, dummy_weights(weights, seed, torch.float32, CPU))
        return taken

    a, b = draw(1, "a", "b")
    assert torch.equal(b, draw(1, "b")[0])
    assert not torch.equal(a, b) and not torch.equal(a, draw(2, "a")[0])
    assert abs(a.std() - 0.02) < 0.001


def test_dummy_norms_are_ones_and_biases_zeros():
    taken = []
    weights = [weight("n", (3,), taken, "ones"), weight("b", (3,), taken, "zeros")]
    load_weights(weights, dummy_weights(weights, 0, torch.float32, CPU))
    assert [t.tolist() for t in taken] == [[1.0] * 3, [0.0] * 3]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "expected"), [(8, 2, 2, (4, 1)), (8, 2, 4, (2, 1)), (8, 8, 4, (2, 2))]
)
def test_heads_of_a_rank(heads, kv_heads, size, expected):
    assert local_heads(heads, kv_heads, size) == expected


def test_six_kv_heads_do_not_split_over_four_ranks():
    with pytest.raises(ConfigError, match="one of 1, 2, 3, 6, 12"):
        local_heads(12, 6, 4)
