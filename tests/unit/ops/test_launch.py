"""Driver settings made before kernels are launched."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from dovetail.core.ops.kernels.launch import PREFER_SHARED, keep_shared_memory

GPU = torch.device("cuda")


@pytest.fixture
def driver(monkeypatch):
    """Record calls of a fake driver. A test may set its return value."""
    driver = SimpleNamespace(calls=[], answer=0)

    def configure(preference: int) -> int:
        driver.calls.append(preference)
        return driver.answer

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: driver.calls.append(device))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuCtxSetCacheConfig=configure))
    return driver


def test_shared_memory_is_preferred_once_there_is_a_context(driver, caplog):
    keep_shared_memory(GPU)
    assert driver.calls == [GPU, PREFER_SHARED] and not caplog.text


def test_a_driver_error_is_logged(driver, caplog):
    driver.answer = 801
    keep_shared_memory(GPU)
    assert "does not prefer shared memory (801)" in caplog.text


@pytest.mark.parametrize("missing", [OSError("libcuda.so.1: cannot open"), AttributeError("cuCtxSetCacheConfig")])
def test_a_missing_driver_is_logged(driver, monkeypatch, caplog, missing):
    def absent(name: str) -> None:
        raise missing

    monkeypatch.setattr(ctypes, "CDLL", absent)
    keep_shared_memory(GPU)
    assert str(missing) in caplog.text


def test_the_cpu_has_no_driver_setting(driver):
    keep_shared_memory(torch.device("cpu"))
    assert driver.calls == []
