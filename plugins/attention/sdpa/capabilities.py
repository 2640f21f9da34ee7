"""Capabilities of the reference backend: every head dim, page size, mask and KV dtype."""

from __future__ import annotations

from dovetail.core.compose.capabilities import Capabilities, Host, Requires
from dovetail.plugins.attention.config import SDPAConfig

KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2")


def capabilities(config: SDPAConfig, host: Host) -> Capabilities:
    return Capabilities(
        provides={
            "kinds": ("full", "window", "mla"),
            "scores": ("soft_cap", "sinks"),
            "exact_lengths": "device",
            "kv_dtypes": KV_DTYPES,
            "tree": True,
            "graphs": False,
        },
        requires=(Requires(kind="engine", key="kv_dtype", allowed=KV_DTYPES, reason="it reads these"),),
    )
