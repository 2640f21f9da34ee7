"""The drafter seam: guesses the next tokens so that one target step can accept several (Leviathan et al. 2023, Chen et
al. 2023)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from dovetail.core.interfaces.kv_cache import KVGroup
    from dovetail.core.interfaces.model import ModelSpec


@dataclass(frozen=True, slots=True)
class TargetView:
    """What a drafter may use of the target model, on this rank."""

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    max_seqs: int
    max_len: int
    embed: Callable[[torch.Tensor], torch.Tensor]
    logits: Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class DraftContext:
    """Device state after a step's verification. Shapes: B rows that sampled, S slots, L tokens."""

    slots_B: torch.Tensor
    """int64"""
    tokens_SL: torch.Tensor
    """int32: every known token of every slot; tokens_SL[slot, :length] is valid."""
    lengths_B: torch.Tensor
    """int32: exact length of each row, tokens just accepted included."""
    max_length: int
    """Host bound of lengths_B."""
    k: int
    """Tokens wanted per row."""
    key_S: torch.Tensor
    """int64: key of each slot's random draws (core.ops.random); the only source of chance a drafter may use."""
    slots_T: torch.Tensor
    """int64: slot of each token the step fed, in the order of the hidden states."""
    positions_T: torch.Tensor
    """int64: its position. A token behind the accepted ones was a rejected draft, or padding."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain of guesses per row (or a tree, when parents is set)."""

    tokens_BK: torch.Tensor
    """int32; entries from count on are ignored."""
    count_B: torch.Tensor
    """int32: guesses of each row, 0 .. K."""
    probs_BKV: torch.Tensor | None = None
    """float32 q(token) the guesses were drawn from; None = point masses (a guess is certain to its drafter)."""
    parents_BK: torch.Tensor | None = None
    """int32 index of each node's parent, -1 = the last accepted token; None = chain. This version verifies chains
    alone and refuses trees."""


class Drafter(ABC):
    """Built once per rank. Every rank must propose the same tokens."""

    needs_host_tokens: bool = False
    """True: drafts come from the host (propose_host) instead of propose. That needs every token, so depth must be 1."""
    taps: tuple[int, ...] = ()
    """Target layers whose hidden states `observe` reads."""

    def __init__(self, config: object) -> None:
        self.config = config

    @property
    @abstractmethod
    def lookahead(self) -> int:
        """Most drafts per row and step; 0 = speculation off."""

    def bind(self, target: TargetView) -> None:
        """Called once, when the target stands."""
        self.target = target

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """KV groups of the drafter's own, beside the target's."""
        return ()

    def observe(self, ctx: DraftContext, hidden_TC: torch.Tensor, taps: Mapping[int, torch.Tensor]) -> None:
        """Sees every step's hidden states, also when no draft was wanted or no row sampled (ctx then has no rows)."""

    @abstractmethod
    def propose(self, ctx: DraftContext) -> Draft:
        """Guess ctx.k tokens a row. On the device, no host sync."""

    def propose_host(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        """At most k guesses for what follows tokens. Called on the host, on rank 0's process, only with
        needs_host_tokens, and without bind: it sees tokens alone."""
        raise NotImplementedError(f"{type(self).__name__} sets needs_host_tokens and has no propose_host")
