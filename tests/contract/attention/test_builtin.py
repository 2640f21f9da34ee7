"""Contract suite for every built-in attention backend."""

from __future__ import annotations

import torch

from dovetail.core.interfaces import MLA, AttentionBackend
from dovetail.core.testing.attention import AttentionContract
from dovetail.plugins.attention.config import SDPAConfig
from dovetail.plugins.attention.sdpa.backend import SDPA


class TestSDPA(AttentionContract):
    scores = ("soft_cap", "sinks")
    kv_dtypes = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
    mla = (MLA(0, 16, 8, 8, 8), MLA(0, 40, 4, 16, 12))
    mla_kv_dtypes = (torch.bfloat16, torch.float8_e4m3fn)

    def make(self) -> AttentionBackend:
        return SDPA(SDPAConfig())


class TestSDPABfloat16(TestSDPA):
    dtype = torch.bfloat16
    kv_dtypes = ()
    mla = TestSDPA.mla[:1]
