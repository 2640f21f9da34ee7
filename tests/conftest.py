"""Shared by all tests."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long inputs take to generate depends on the machine's load.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
# Tests share a machine; torch's own thread pool in each worker would only make them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests use plain HTTP; without this each client of httpx loads all certificate authorities, for 25 ms of CPU time.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
# Ignored in what a shell runs in the background, and children would inherit that: some tests press Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
if os.environ.get("TRITON_INTERPRET") == "1":
    from dovetail.core.testing.interpreter import quicken

    quicken()

    def pytest_sessionfinish() -> None:
        """Write the functions that ran to the file that test_in_interpreter.py names."""
        if path := os.environ.get("DOVETAIL_INTERPRETED"):
            from triton.runtime.interpreter import InterpretedFunction

            ran = {f"{fn.__module__}:{fn.__name__}" for fn in InterpretedFunction.rewritten_fn}
            Path(path).write_text("\n".join(sorted(ran)))


NIGHTLY = "DOVETAIL_NIGHTLY" in os.environ
UNTIL = float(os.environ.get("DOVETAIL_UNTIL", "inf"))
"""Seconds since 1970 after which no test begins any more. CI has a limit, which a machine with busy neighbours would
exceed; it prints how many tests it left out."""

LEFT_OUT = "the time of .ci/run is over"

CLOCKED = (
    "server",
    "tp",
    "contract/collective",
    "contract/executor",
    "unit/serving",
    "unit/frontend",
    "unit/executor",
    "unit/parallel",
)
"""Folders whose tests wait for other processes, which a busy machine can delay beyond any sensible deadline. A failure
there is retried once, and both tries are reported."""

FIRST = (
    "docs/test_pages.py",
    "unit/ops/test_compiled.py",
    "unit/ops/test_compiled_attention.py",
    "server/test_faults.py",
    "unit/ops/test_architectures.py",
    "tp/test_symm_mem.py",
    "third_party/test_lighthouse.py",
    "third_party/test_new.py",
    "server/test_processes.py",
    "tp/test_multiproc.py",
    "server/test_limits.py",
    "contract/executor/test_builtin.py",
    "server/test_load.py",
    "unit/benchmarks/test_compare.py",
    "server/test_replicas.py",
    "test_in_interpreter.py",
    "server/test_hostile.py",
    "numerics/test_quality.py",
    "unit/worker/test_variants.py",
    "server/test_traces.py",
    "contract/scheduler/test_builtin.py",
    "server/test_adapters.py",
    "invariance/test_same_tokens.py",
    "server/test_embeddings.py",
    "unit/engine/test_grammars.py",
    "server/test_responses.py",
)
"""Slow files start first: a worker that begins one when the others have finished works alone. Servers mostly wait, so
their tests alternate with those that compute."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > UNTIL:
        pytest.skip(LEFT_OUT)


def pytest_report_header() -> str | None:
    return None if NIGHTLY else "tests that take long are deselected; .ci/nightly runs them, with DOVETAIL_NIGHTLY=1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    if not NIGHTLY and (long := [item for item in items if item.get_closest_marker("nightly")]):
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    if "DOVETAIL_INTERPRETED" in os.environ and os.environ.get("DOVETAIL_KERNELS") != "all":
        items[:] = _every_other(items)
    first = {here / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: first.get(item.path, len(first)))
    folders = tuple(f"{here / folder}{os.sep}" for folder in CLOCKED)
    for item in items:
        if str(item.path).startswith(folders):
            item.add_marker(pytest.mark.flaky(reruns=1))


def _every_other(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return half of the variants of each test, its first one included. The interpreter takes long."""
    counts: dict[str, int] = {}
    kept = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        counts[test] = counts.get(test, -1) + 1
        if counts[test] % 2 == 0:
            kept.append(item)
    return kept


@pytest.fixture
def save_lora(tmp_path: Path) -> Callable[..., str]:
    """save_lora("name", seed=1): a folder with a random LoRA of the bundled model, strong enough to change its
    tokens."""

    def save(name: str, *, seed: int, rank: int = 8, std: float = 0.25, **config: object) -> str:
        import torch
        from safetensors import safe_open
        from safetensors.torch import save_file

        from dovetail.core.checkpoint import locate
        from dovetail.core.compose import compose

        base = locate(compose(["model=tiny"]).part("model").config.path) / "model.safetensors"
        random = torch.Generator().manual_seed(seed)
        tensors = {}
        with safe_open(base, "pt") as weights:
            for tensor in weights.keys():
                if tensor.endswith("_proj.weight"):
                    outputs, inputs = weights.get_slice(tensor).get_shape()
                    prefix = f"base_model.model.{tensor.removesuffix('.weight')}"
                    for factor, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                        values = torch.randn(shape, generator=random) * std / shape[1] ** 0.5
                        tensors[f"{prefix}.lora_{factor}.weight"] = values
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        stated = {"peft_type": "LORA", "r": rank, "lora_alpha": 4 * rank, "target_modules": "all-linear", **config}
        (folder / "adapter_config.json").write_text(json.dumps(stated))
        return str(folder)

    return save
