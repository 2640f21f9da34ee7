"""Collective of a single rank."""

from __future__ import annotations

import torch

from dovetail.core.interfaces import Collective


class Alone(Collective):
    """Collective of a single rank: each call is the identity. A layer that is built with it has all channels."""

    def connect(self, rank: int, size: int, address: str, device: torch.device) -> None: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        return x

    def barrier(self) -> None: ...

    def close(self) -> None: ...
