"""Capabilities of the FlashInfer backend, and whether its package is installed."""

from __future__ import annotations

from importlib.util import find_spec

from dovetail.core.compose.capabilities import Capabilities, Host, Requires
from dovetail.plugins.attention.config import FlashInferConfig

KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2")
DTYPES = ("auto", "bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
AMPERE = (8, 0)


def capabilities(config: FlashInferConfig, host: Host) -> Capabilities:
    requires = (
        Requires(kind="host", key="device", allowed=("cuda",), reason="its kernels are compiled for a GPU"),
        Requires(kind="engine", key="device", allowed=("auto", "cuda"), reason="it runs only on a GPU"),
        Requires(kind="engine", key="dtype", allowed=DTYPES, reason="its kernels take 16-bit queries"),
        Requires(kind="engine", key="kv_dtype", allowed=KV_DTYPES, reason="pages have the queries' dtype or 8 bits"),
        Requires(
            kind="engine",
            key="overlap_tokens",
            allowed=(0,),
            reason="it plans on the host for one batch at a time: two half-batches would need new plans in every layer",
        ),
        Requires(kind="model", key="head_dim", allowed=HEAD_DIMS, reason="its kernels are made for these"),
    )
    hardware = Requires(kind="host", key="compute_capability", at_least=AMPERE, reason="its kernels need Ampere")
    installed = find_spec("flashinfer") is not None
    return Capabilities(
        provides={
            "kinds": ("full", "window"),
            "scores": (),
            "exact_lengths": "host",
            "kv_dtypes": KV_DTYPES,
            "tree": False,
            "graphs": False,
        },
        requires=(*requires, hardware) if host.device_count else requires,
        lacks=() if installed else ("the package flashinfer-python: pip install 'dovetail[flashinfer]'",),
    )
