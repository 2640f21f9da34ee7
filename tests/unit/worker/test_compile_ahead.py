"""Launches that compile in threads and run nothing. Needs no GPU, like tests/unit/ops/test_compiled.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs
from triton.runtime.jit import JITCallable, JITFunction

from dovetail.core.ops import rms_norm, silu_and_mul
from dovetail.core.ops.compile_ahead import compile_ahead
from dovetail.core.ops.compile_server import CompileServer, Job
from dovetail.core.testing.compiling import compiled_for_hopper
from dovetail.core.worker.warmup import report_unwarmed_kernels
from dovetail.plugins.quant.fp8.format import FP8_TOKEN


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[list[str]]:
    """Names of the threads that compiled something."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    found: list[str] = []
    knobs.compilation.listener = lambda **event: found.append(threading.current_thread().name)
    yield found
    knobs.compilation.listener = None


def test_launches_compile_in_the_pool(compiling: list[str]) -> None:
    with compiled_for_hopper() as compiled:
        launch = JITFunction.run
        with compile_ahead(2):
            x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((3, 72), (72,)))
            for _ in range(2):
                rms_norm(x, None, weight, 1e-5)
                silu_and_mul(x)
        assert JITFunction.run is launch
    assert compiled.launches == 4
    assert len(compiling) == 2 and all(name.startswith("compile") for name in compiling)


def test_a_kernel_is_prepared_once(compiling: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 does not remember pending compilations; 3.7 does."""
    start, prepared = JITFunction._do_compile, []

    def forgetful(kernel: Any, key: Any, signature: Any, device: Any, *more: Any) -> Any:
        made = start(kernel, key, signature, device, *more)
        prepared.append(kernel.device_caches[device][0].pop(key, made))
        return made

    monkeypatch.setattr(JITFunction, "_do_compile", forgetful)
    with compiled_for_hopper(), compile_ahead(2):
        for _ in range(5):
            silu_and_mul(torch.empty(3, 72, dtype=torch.bfloat16, device="cuda"))
    assert len(prepared) == len(compiling) == 1


def test_a_kernel_that_start_up_missed_is_reported(compiling: list[str], caplog: pytest.LogCaptureFixture) -> None:
    def launch(columns: int) -> None:
        silu_and_mul(torch.empty(3, columns, dtype=torch.bfloat16, device="cuda"))

    with compiled_for_hopper():
        report_unwarmed_kernels(True)
        launch(72)
        assert len(compiling) == 1 and not caplog.text, "another listener is there"
        knobs.compilation.listener = None
        report_unwarmed_kernels(True)
        launch(72)
        assert not caplog.text, "the kernel is compiled already"
        launch(4096)
        launch(4096)
        report_unwarmed_kernels(False)
        launch(8192)
    assert knobs.compilation.listener is None
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "silu_and_mul" in record.message and "was compiled" in record.message


def test_unwritten_memory_reads_as_zeros() -> None:
    torch.use_deterministic_algorithms(True)  # It fills new memory with NaN.
    try:
        with compile_ahead(1):
            made = torch.empty(4), torch.ones(4).new_empty(3), torch.empty_like(torch.ones(5))
        assert torch.cat(made).tolist() == [0] * 12
        assert torch.empty(4).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_error_in_the_block_restores_launches() -> None:
    launch = JITFunction.run
    with pytest.raises(RuntimeError, match="mine"), compile_ahead(1):
        raise RuntimeError("mine")
    assert JITFunction.run is launch


@triton.jit
def _broken(x_ptr):
    tl.store(x_ptr, missing)  # noqa: F821


def test_a_kernel_that_does_not_compile_leaves_no_mode(compiling: list[str]) -> None:
    with compiled_for_hopper():
        x = torch.empty(3, 72, dtype=torch.bfloat16, device="cuda")
        with pytest.raises(triton.CompilationError, match="missing"), compile_ahead(1):
            _broken[(1,)](x)
        with compile_ahead(1):
            silu_and_mul(x)
    assert len(compiling) == 1


def test_one_thread_at_a_time_parses(compiling: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parsing, most = 0, 0
    parse = JITFunction.parse

    def slow(function: Any) -> Any:
        nonlocal parsing, most
        parsing += 1
        most = max(most, parsing)
        time.sleep(0.05)
        tree = parse(function)
        parsing -= 1
        return tree

    monkeypatch.setattr(JITCallable, "parse", slow)
    with compiled_for_hopper(), compile_ahead(4):
        for columns in (72, 144, 4096, 8192):
            silu_and_mul(torch.empty(3, columns, dtype=torch.bfloat16, device="cuda"))
    assert len(compiling) > 1 and most == 1
    assert JITCallable.parse is slow


VALUE = tl.constexpr(2.0)


@triton.jit
def _inner(x):
    return x * VALUE


@triton.jit
def _outer(x_ptr):
    tl.store(x_ptr, _inner(tl.load(x_ptr)))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that the server was asked for."""
    found: list[str] = []
    compile_job = CompileServer.compile

    def noted(server: CompileServer, job: Job) -> None:
        found.append(job.kernel.__name__)
        compile_job(server, job)

    monkeypatch.setattr(CompileServer, "compile", noted)
    return found


def test_a_server_compiles_into_tritons_cache(
    compiling: list[str], asked: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The encoder of the norm is a constant that is a function. `_outer` calls a function with a global value, which
    Triton has met in this process and not in the server."""
    assert _inner.cache_key
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))  # The server imports this file.
    here: list[str] = []
    knobs.compilation.listener = lambda src, cache_hit, **event: cache_hit or here.append(src.name)

    @triton.jit
    def without_a_name(x_ptr):
        tl.store(x_ptr, 1.0)

    def launch_all() -> None:
        x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((3, 72), (72,)))
        rms_norm(x, None, weight, 1e-5, (FP8_TOKEN,))
        _outer[(1,)](x)
        without_a_name[(1,)](x)

    with CompileServer(2) as server:
        for _ in range(2):
            with compiled_for_hopper(), compile_ahead(2, server=server):
                launch_all()
        assert sorted(asked) == ["_outer", "_rms_norm", "without_a_name"], "the second start finds all in the cache"
        assert here == ["without_a_name"], "the other kernels were compiled by the server"
        server._popen.kill()
        with compiled_for_hopper(), compile_ahead(2, server=server):
            silu_and_mul(torch.empty(3, 72, dtype=torch.bfloat16, device="cuda"))
    assert here == ["without_a_name", "_silu_and_mul"]
    assert "was killed by SIGKILL" in caplog.text and "kernels compile in threads instead" in caplog.text


def test_processes_wait_for_one_that_compiles_the_same(
    compiling: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    compile_job, jobs = CompileServer.compile, []
    monkeypatch.setattr(CompileServer, "compile", lambda server, job: jobs.append(job))
    with CompileServer(1) as server:
        with compiled_for_hopper(), compile_ahead(1, server=server):
            for dtype in (torch.float32, torch.int32):
                _outer[(1,)](torch.empty(3, device="cuda", dtype=dtype))
        monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "other"))
        first, second = (job._replace(cache_folder=knobs.cache.dir) for job in jobs)
        compile_job(server, first)
        assert first.stored(), "the server is ready"
        waiting = threading.Thread(target=compile_job, args=(server, second))
        with second.lock():
            waiting.start()
            waiting.join(1.0)
            assert waiting.is_alive() and not second.stored()
        waiting.join()
        assert second.stored()
