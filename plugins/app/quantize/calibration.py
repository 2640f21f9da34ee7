"""Text and statistics of the calibration. Shapes: S sequences, L positions, T tokens, I inputs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import Checkpoint
from dovetail.core.tokenizer import Tokenizer

BUNDLED = (
    "pydoc_data.topics", "asyncio.base_events", "dataclasses", "datetime", "decimal", "doctest", "email.message",
    "http.client", "http.server", "inspect", "logging", "optparse", "pathlib", "pdb", "shutil", "socket", "subprocess",
    "tarfile", "threading", "turtle", "typing", "unittest.mock", "zipfile", "_pydecimal",
)  # fmt: skip
"""Modules of Python's standard library, 2 MB; the first has English text."""


def read_sequences(path: str | None, checkpoint: Checkpoint, samples: int, length: int) -> torch.Tensor:
    """Return up to `samples` sequences of tokens [S, L], evenly spaced in the text. Raises ConfigError for a text that
    cannot be read or that is shorter than one sequence."""
    tokenizer = Tokenizer(checkpoint)
    tokens_T = torch.tensor(tokenizer.encode(_bundled() if path is None else _text(path), special=False))
    whole = len(tokens_T) // length
    if not whole:
        raise ConfigError(
            f"quantize.text={path}: the text has {len(tokens_T)} tokens, and quantize.length={length} are a sequence: "
            "use a longer text or a smaller length"
        )
    chosen_S = torch.linspace(0, whole - 1, min(samples, whole)).round().long()
    return tokens_T[: whole * length].view(whole, length)[chosen_S]


def _text(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"quantize.text={path}: cannot be read as UTF-8 text ({error})") from None


def _bundled() -> str:
    found = [importlib.util.find_spec(name) for name in BUNDLED]
    return "\n".join(Path(spec.origin).read_text(encoding="utf-8") for spec in found if spec and spec.origin)


@dataclass(slots=True)
class InputStatistics:
    """Sums over the tokens of one input, float32. Written by `add`."""

    gram_II: torch.Tensor
    """Sum of the products of channels."""
    magnitude_I: torch.Tensor
    """Sum of magnitudes."""
    largest_I: torch.Tensor
    """Largest magnitude."""
    tokens: int = 0

    @classmethod
    def empty(cls, inputs: int, device: torch.device) -> InputStatistics:
        zero_I = torch.zeros(inputs, device=device)
        return cls(torch.zeros(inputs, inputs, device=device), zero_I, zero_I.clone())

    def add(self, x: torch.Tensor) -> None:
        x_TI = x.flatten(0, -2).float()
        self.gram_II += x_TI.t() @ x_TI
        self.magnitude_I += x_TI.abs().sum(0)
        self.largest_I = torch.maximum(self.largest_I, x_TI.abs().amax(0))
        self.tokens += len(x_TI)

    def divided(self, scale_I: torch.Tensor) -> InputStatistics:
        """Return the statistics of the input divided by a scale."""
        gram_II = self.gram_II / scale_I[:, None] / scale_I
        return InputStatistics(gram_II, self.magnitude_I / scale_I, self.largest_I / scale_I, self.tokens)


class BlockStatistics:
    """Statistics of the inputs of one block, and the largest magnitudes of its keys and values."""

    def __init__(self) -> None:
        self.inputs: dict[str, InputStatistics] = {}
        self.largest = {"k": 0.0, "v": 0.0}

    def __call__(self, name: str, values: torch.Tensor) -> None:
        if name in self.largest:
            self.largest[name] = max(self.largest[name], values.abs().max().item())
            return
        if name not in self.inputs:
            self.inputs[name] = InputStatistics.empty(values.shape[-1], values.device)
        self.inputs[name].add(values)
