"""Modules of this engine in the place of those of a transformers model. Shapes: T tokens, C channels, O outputs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from dovetail.core.interfaces import PLAIN, Collective, Partial
from dovetail.core.layers import Linear, LMHead, RMSNorm, VocabParallelEmbedding
from dovetail.core.ops import encode, rms_norm


def rows(x: torch.Tensor) -> torch.Tensor:
    """Return [..., C] as [T, C], contiguous as kernels read it."""
    return x.reshape(-1, x.shape[-1]).contiguous()


class LinearModule(nn.Module):
    """A linear layer whose weight is in the quantizer's format. Its output is the sum over ranks."""

    def __init__(self, linear: Linear, collective: Collective) -> None:
        super().__init__()
        self.linear, self.collective = linear, collective

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor | Partial = self.linear(encode(rows(x), self.linear.inputs))
        y_TO = self.collective.reduce(y)
        return y_TO.view(*x.shape[:-1], y_TO.shape[-1])


class SharedProduct:
    """One matmul for several matrices with the same input. The first module that is called multiplies for all."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self._input: torch.Tensor | None = None
        """Input of the outputs that no module has taken yet. Held, so that no other tensor gets the same identity."""
        self._outputs: dict[int, torch.Tensor] = {}

    def take(self, part: int, x: torch.Tensor) -> torch.Tensor:
        """Return the product with one of the matrices."""
        if self._input is not x or part not in self._outputs:
            y_TO = self.linear(encode(rows(x), self.linear.inputs))
            parts = y_TO.view(*x.shape[:-1], -1).split(self.linear.shape.parts, dim=-1)
            self._input, self._outputs = x, dict(enumerate(parts))
        output = self._outputs.pop(part)
        if not self._outputs:
            self._input = None
        return output


class SiblingModule(nn.Module):
    """A matrix of a SharedProduct."""

    def __init__(self, shared: SharedProduct, part: int) -> None:
        super().__init__()
        self.shared, self.part = shared, part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared.take(self.part, x)


class NormModule(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bundle, _ = self.norm(rows(x))
        return bundle[PLAIN].values.view(x.shape)


class EmbeddingModule(nn.Module):
    """Token embedding, split over ranks by vocabulary."""

    def __init__(self, embedding: VocabParallelEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens.flatten()).view(*tokens.shape, -1)


class HeadModule(nn.Module):
    """Logits of the whole vocabulary."""

    def __init__(self, head: LMHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        logits = self.head(rows(states))
        return logits.view(*states.shape[:-1], logits.shape[-1])


class StatesModule(nn.Module):
    """Stands for the decoder's body where the library's class only runs its head: it returns its inputs as states."""

    @property
    def decoder(self) -> StatesModule:
        """Body within the body (OPT)."""
        return self

    def forward(self, *ignored: Any, inputs_embeds: torch.Tensor, **others: Any) -> StatesOutput:
        return StatesOutput(inputs_embeds)


class StatesOutput:
    """States as the library's records of outputs have them; every other field is None."""

    def __init__(self, states: torch.Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def eps_of(module: nn.Module) -> float | None:
    """Return the epsilon of a norm; None = it has none under a known name."""
    return next((value for name in _EPS if isinstance(value := getattr(module, name, None), float)), None)


_EPS = ("variance_epsilon", "eps", "epsilon")


def computes_rms_norm(module: nn.Module) -> bool:
    """Whether a module with a weight computes RMSNorm with that weight, tried on random input in float32."""
    eps, names = eps_of(module), [name for name, _ in module.named_parameters()]
    if names != ["weight"] or eps is None or list(module.buffers()):
        return False
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.device("cpu"):
        probe = copy.deepcopy(module).to_empty(device="cpu").float()
        weight_C = probe.get_parameter("weight")
        weight_C.copy_(torch.rand(weight_C.shape, generator=generator) + 0.5)
        x = torch.randn(3, len(weight_C), generator=generator)
        bundle, _ = rms_norm(x, None, weight_C, eps)
        try:
            found = probe(x)
        except (TypeError, ValueError, RuntimeError):  # It has further inputs.
            return False
    return isinstance(found, torch.Tensor) and torch.allclose(found, bundle[PLAIN].values, rtol=1e-5, atol=1e-6)
