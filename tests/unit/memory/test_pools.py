"""KV pools and page copies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.errors import CapabilityError, CapacityError
from dovetail.core.interfaces import KVGroup, PageOp, PageOpKind, Plane
from dovetail.core.memory.pools import apply_page_ops, make_host_pools, make_pools, pool_bytes

CPU = torch.device("cpu")
GROUPS = (
    KVGroup(0, (0, 2), (Plane("k", (2, 4), torch.float32), Plane("v", (2, 4), torch.float32)), page_tokens=2),
    KVGroup(3, (1,), (Plane("k", (2, 4), torch.float16), Plane("scale", (2,), torch.float32)), page_tokens=2),
)
PAGES = {0: 5, 3: 5}


def test_pools_have_a_scratch_page_and_no_garbage():
    pools = make_pools(GROUPS, PAGES, CPU)
    assert pools[0].planes["k"].shape == (2, 6, 2, 2, 4)
    assert pools[3].planes["scale"].shape == (1, 6, 2, 2)
    assert all(not plane.any() for pool in pools.values() for plane in pool.planes.values())
    assert pool_bytes(GROUPS, PAGES) == sum(p.nbytes for pool in pools.values() for p in pool.planes.values())


ops = st.lists(
    st.builds(PageOp, st.sampled_from([0, 1, 2]), st.sampled_from([0, 3]), st.integers(1, 5), st.integers(1, 5))
)


@given(ops)
def test_page_ops_equal_running_them_one_after_another(ops):
    pools, host = make_pools(GROUPS, PAGES, CPU), make_host_pools(GROUPS, PAGES, CPU)
    expected = {}
    for id, pool in pools.items():
        for name, plane in pool.planes.items():
            plane.copy_(torch.arange(plane.numel()).view(plane.shape))
            host[id][name].copy_(-torch.arange(plane.numel()).view(host[id][name].shape))
            expected[id, name] = plane.clone(), host[id][name].clone()

    apply_page_ops(pools, ops, host)

    for op in ops:
        for (id, _), (device_plane, host_plane) in expected.items():
            if id == op.group and op.kind == PageOpKind.COPY:
                device_plane[:, op.dst] = device_plane[:, op.src].clone()
            elif id == op.group and op.kind == PageOpKind.LOAD:
                device_plane[:, op.dst] = host_plane[op.src]
            elif id == op.group:
                host_plane[op.dst] = device_plane[:, op.src]
    for (id, name), (device_plane, host_plane) in expected.items():
        assert torch.equal(pools[id].planes[name], device_plane)
        assert torch.equal(host[id][name], host_plane)


def test_pages_that_memory_has_no_addresses_for_are_refused():
    with pytest.raises(CapacityError, match="the KV cache needs .* bytes, which could not be allocated on cpu"):
        make_pools(GROUPS, {0: 2**43, 3: 5}, CPU)


def test_more_host_pages_than_memory_are_refused():
    with pytest.raises(CapacityError, match="host tier.*half of the free memory"):
        make_host_pools(GROUPS, {0: 10**12}, CPU)


def test_host_page_errors_are_readable():
    with pytest.raises(CapabilityError, match="LOAD of KV page 7.*no host tier"):
        apply_page_ops(make_pools(GROUPS, PAGES, CPU), [PageOp(PageOpKind.LOAD, 0, 7, 1)])
