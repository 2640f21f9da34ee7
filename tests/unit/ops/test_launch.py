"""What the driver is told before kernels are launched."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from dovetail.core.ops.kernels.launch import PREFER_SHARED, keep_shared_memory

GPU = torch.device("cuda")


@pytest.fixture
def told(monkeypatch):
    """What a driver that there is not was told; a test may set its answer."""
    driver = SimpleNamespace(said=[], answer=0)

    def configure(preference: int) -> int:
        driver.said.append(preference)
        return driver.answer

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: driver.said.append(device))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuCtxSetCacheConfig=configure))
    return driver


def test_shared_memory_is_kept_once_there_is_a_context(told, caplog):
    keep_shared_memory(GPU)
    assert told.said == [GPU, PREFER_SHARED] and not caplog.text


def test_a_driver_that_refuses_is_told_of(told, caplog):
    told.answer = 801
    keep_shared_memory(GPU)
    assert "does not prefer shared memory (801)" in caplog.text


@pytest.mark.parametrize("missing", [OSError("libcuda.so.1: cannot open"), AttributeError("cuCtxSetCacheConfig")])
def test_so_is_one_that_is_not_there(told, monkeypatch, caplog, missing):
    def absent(name: str) -> None:
        raise missing

    monkeypatch.setattr(ctypes, "CDLL", absent)
    keep_shared_memory(GPU)
    assert str(missing) in caplog.text


def test_the_cpu_has_none(told):
    keep_shared_memory(torch.device("cpu"))
    assert told.said == []
