"""Which GPU a rank takes."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.compose import compose
from dovetail.core.engine.checks import check_fit
from dovetail.core.errors import ConfigError
from dovetail.core.worker.dtypes import resolve_device


def test_ranks_take_consecutive_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [resolve_device("cuda", rank, 2) for rank in range(2)] == [torch.device("cuda", 2), torch.device("cuda", 3)]
    with pytest.raises(ConfigError, match=r"rank 2 needs GPU 4 \(engine.first_gpu=2\), .* has 4.*; .*engine.dp"):
        resolve_device("cuda", 2, 2)
    assert resolve_device("cpu", 7, 2) == torch.device("cpu")


def test_auto_never_falls_back_to_the_cpu_when_gpus_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second replica of a host with one GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("auto", 0, 0) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="needs GPU 1"):
        resolve_device("auto", 0, 1)


@pytest.mark.parametrize("words", [("+preset=h200_fp8_tp1",), ("engine.device=cuda", "engine.tune_table=table.json")])
def test_a_preset_of_a_gpu_is_refused_without_one(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    """The cost model and the table are for a GPU, whose name torch cannot state here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="rank 0 needs GPU 0 .*this host has 0"):
        check_fit(compose([*words, "model=tiny"]))
