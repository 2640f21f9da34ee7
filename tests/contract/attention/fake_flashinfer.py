"""The part of FlashInfer's API that attention=flashinfer calls, computed key by key on the CPU. Everything that
FlashInfer would misread or refuse fails here: indices, lengths, shapes, dtypes, a run without a plan, a plan during a
pending copy.

Signatures are those of flashinfer-python 0.6.12; tests/gpu runs the suite with the real package.
"""

from __future__ import annotations

import torch


class Event:
    """Stand-in for torch.cuda.Event. A copy to the device counts as finished once an event recorded after it was waited
    for."""

    begun = 0
    over = 0

    def record(self) -> None:
        self.at = Event.begun

    def synchronize(self) -> None:
        Event.over = max(Event.over, self.at)


class _Wrapper:
    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8 and workspace.numel() >= 16 << 20 and layout == "NHD"
        self.workspace = workspace
        self.copy = 0
        self.planned = False

    def _plan(self, query_start, page_start, pages, last_page, heads, kv_heads, head_dim, page_size, options):
        assert self.copy <= Event.over, "a plan writes over pinned memory that is still being copied"
        Event.begun += 1
        self.copy = Event.begun
        for tensor in (query_start, page_start, pages, last_page, options["seq_lens"]):
            assert tensor.dtype == torch.int32 and tensor.is_contiguous()
        rows = len(last_page)
        assert len(query_start) == len(page_start) == rows + 1 and len(pages) == page_start[-1]
        assert ((last_page >= 1) & (last_page <= page_size)).all() and heads % kv_heads == 0
        assert torch.equal((page_start.diff() - 1) * page_size + last_page, options["seq_lens"])
        assert options["window_left"] >= -1
        self.query_start, self.page_start, self.pages = query_start.tolist(), page_start.tolist(), pages.long()
        self.lengths, self.shape, self.page_size = options["seq_lens"].tolist(), (heads, kv_heads, head_dim), page_size
        self.options, self.planned = options, True

    def run(self, q, paged_kv_cache, *, k_scale=None, v_scale=None, out=None):
        assert self.planned, "run before plan"
        heads, kv_heads, dim = self.shape
        assert q.shape == out.shape == (self.query_start[-1], heads, dim) and q.is_contiguous() and out.is_contiguous()
        assert q.dtype == out.dtype == self.options["q_data_type"]
        for scale in (k_scale, v_scale):
            assert scale is None or isinstance(scale, float)
        for cache in paged_kv_cache:
            assert cache.shape[1:] == (self.page_size, kv_heads, dim) and cache.is_contiguous()
            assert cache.dtype == self.options["kv_data_type"]
        sm_scale = self.options["sm_scale"] * (1.0 if k_scale is None else k_scale)
        for row, length in enumerate(self.lengths):
            pages = self.pages[self.page_start[row] : self.page_start[row + 1]]
            first, last = self.query_start[row], self.query_start[row + 1]
            for i in range(last - first):
                at = length - (last - first) + i
                lo = max(at - self.options["window_left"], 0) if self.options["window_left"] >= 0 else 0
                place = torch.arange(lo, at + 1)
                slots = pages[place // self.page_size] * self.page_size + place % self.page_size
                k, v = (_read(cache, slots).repeat_interleave(heads // kv_heads, 1) for cache in paged_kv_cache)
                weights = (torch.einsum("hd,lhd->hl", q[first + i].double(), k) * sm_scale).softmax(-1)
                out[first + i] = torch.einsum("hl,lhd->hd", weights, v).to(out.dtype)
        if v_scale is not None:
            out *= v_scale
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, use_tensor_cores=False, backend="auto"):
        super().__init__(float_workspace_buffer, kv_layout)
        assert use_tensor_cores and backend == "fa2"

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *, window_left=-1, q_data_type, kv_data_type, sm_scale, seq_lens,
    ):  # fmt: skip
        options = dict(window_left=window_left, q_data_type=q_data_type, kv_data_type=kv_data_type)
        options |= dict(sm_scale=sm_scale, seq_lens=seq_lens)
        one_each = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._plan(one_each, indptr, indices, last_page_len, *shape, options)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        super().__init__(float_workspace_buffer, kv_layout)
        self.backend = backend

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *, causal=False, sm_scale, window_left=-1, q_data_type, kv_data_type, seq_lens,
        max_token_per_sequence,
    ):  # fmt: skip
        assert causal and max_token_per_sequence == qo_indptr.diff().max()
        assert window_left == -1 or self.backend == "fa2", "FlashAttention-3 reads behind the window"
        options = dict(window_left=window_left, q_data_type=q_data_type, kv_data_type=kv_data_type)
        options |= dict(sm_scale=sm_scale, seq_lens=seq_lens)
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._plan(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, *shape, options)


def _read(cache_PSKD: torch.Tensor, slots_L: torch.Tensor) -> torch.Tensor:
    """Return float64 [L, K, D]. 8-bit floats cannot be indexed, so this indexes their bytes."""
    flat = cache_PSKD.flatten(0, 1)
    if flat.dtype.itemsize == 1:
        return flat.view(torch.uint8)[slots_L].view(flat.dtype).double()
    return flat[slots_L].double()
