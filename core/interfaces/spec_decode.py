"""Drafter contract: tokens of which one target step can accept several (Leviathan et al. 2023, Chen et al. 2023)."""

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
    """The parts of the target model that a drafter may use, on this rank."""

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    max_seqs: int
    max_len: int
    embed: Callable[[torch.Tensor], torch.Tensor]
    logits: Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class DraftContext:
    """Device state after verification. Shapes: B rows that sampled, S slots, L tokens a slot, T tokens of the step."""

    slots_B: torch.Tensor
    """int64"""
    tokens_SL: torch.Tensor
    """int32: all known tokens of every slot; tokens_SL[slot, :length] is valid."""
    lengths_B: torch.Tensor
    """int32: exact length of each row, including the tokens just accepted."""
    max_length: int
    """Upper bound of lengths_B, known on the host."""
    k: int
    """Number of draft tokens requested per row."""
    key_S: torch.Tensor
    """int64: key of each slot's random draws (core.ops.random), the only permitted source of randomness."""
    slots_T: torch.Tensor
    """int64: slot of each token of the step, in the order of the hidden states."""
    positions_T: torch.Tensor
    """int64: position of each token of the step. Tokens after the accepted ones are rejected drafts or padding."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain of draft tokens per row (or a tree, if parents_BK is set)."""

    tokens_BK: torch.Tensor
    """int32; entries from count_B on are ignored."""
    count_B: torch.Tensor
    """int32: number of draft tokens of each row, 0 .. K."""
    probs_BKV: torch.Tensor | None = None
    """float32: probabilities q(token) from which the tokens were drawn; None = point masses (deterministic drafts)."""
    parents_BK: torch.Tensor | None = None
    """int32: index of each node's parent, -1 = the last accepted token; None = chain. Trees are refused so far."""


class Drafter(ABC):
    """Proposes draft tokens. Built once per rank; all ranks must propose the same tokens."""

    needs_host_tokens: bool = False
    """True = drafts come from propose_host, which needs every token on the host, so depth must be 1."""
    taps: tuple[int, ...] = ()
    """Target layers whose hidden states are passed to `observe`."""

    def __init__(self, config: object) -> None:
        self.config = config

    @property
    @abstractmethod
    def lookahead(self) -> int:
        """Maximum number of drafts per row and step; 0 = speculation off."""

    def bind(self, target: TargetView) -> None:
        """Take the target model. Called once, after it is built."""
        self.target = target

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Additional KV groups for the drafter itself."""
        return ()

    def observe(self, ctx: DraftContext, hidden_TC: torch.Tensor, taps: Mapping[int, torch.Tensor]) -> None:
        """Receive the hidden states of every step, even if no draft was requested or ctx has no rows."""

    @abstractmethod
    def propose(self, ctx: DraftContext) -> Draft:
        """Propose up to ctx.k tokens per row. Called before a step that verifies drafts, for the rows that the step
        before it sampled. Runs on the device without host sync."""

    def propose_host(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        """Return at most k tokens to follow `tokens`. Called on the host in rank 0's process, only with
        needs_host_tokens and without `bind`: its sole input is `tokens`."""
        raise NotImplementedError(f"{type(self).__name__} sets needs_host_tokens and has no propose_host")
