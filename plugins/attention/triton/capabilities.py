"""Capabilities of the Triton backend."""

from __future__ import annotations

from dovetail.core.compose.capabilities import FP8_HARDWARE, Capabilities, Host, Requires
from dovetail.plugins.attention.config import TritonConfig

PLAIN_KV_DTYPES = ("auto", "float32", "bfloat16", "float16")
OLD_KV_DTYPES = (*PLAIN_KV_DTYPES, "fp8_e5m2")
"""Before Ada; E5M2 is a float16 without its lower half, so that its conversion needs no hardware."""
KV_DTYPES = (*OLD_KV_DTYPES, "fp8_e4m3")
MAX_HEAD_DIM = 256


def capabilities(config: TritonConfig, host: Host) -> Capabilities:
    old = bool(host.device_count) and host.compute_capability < FP8_HARDWARE
    dtypes = OLD_KV_DTYPES if old else KV_DTYPES
    reason = "this GPU cannot convert E4M3, as Ada and Hopper do" if old else "its kernels read these"
    return Capabilities(
        provides={
            "kinds": ("full", "window", "mla"),
            "scores": ("soft_cap", "sinks"),
            "exact_lengths": "device",
            "kv_dtypes": dtypes,
            "tree": True,
            "graphs": "mixed",
        },
        requires=(
            Requires(kind="host", key="device", allowed=("cuda",), reason="its kernels are compiled for a GPU"),
            Requires(kind="engine", key="device", allowed=("auto", "cuda"), reason="it runs only on a GPU"),
            Requires(kind="engine", key="kv_dtype", allowed=dtypes, reason=reason),
            Requires(kind="model", key="head_dim", at_most=MAX_HEAD_DIM, reason="a head must fit into one tile"),
        ),
    )
