"""Llama models for the driver that runs a model without the engine."""

from __future__ import annotations

from pathlib import Path

import torch

from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.testing.model_driver import Driver, build_context
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama

__all__ = ["CPU", "Driver", "build_model", "load_model"]

CPU = torch.device("cpu")


def build_model(config: LlamaConfig, **options) -> Llama:
    """Build a model without weights. Options are those of build_context."""
    return Llama(config, build_context(Llama.spec(config), **options))


def load_model(folder: Path, config: LlamaConfig | None = None, **options) -> Llama:
    """`config`: None = the defaults."""
    model = build_model(config or LlamaConfig(path=str(folder)), **options)
    model.load(open_checkpoint(folder).open())
    return model
