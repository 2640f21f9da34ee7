"""The parts of a rank that exist before the number of its KV pages is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.core.interfaces import Adapters, AttentionBackend, Drafter, KVGroup, LogitsProcessor, Model
from dovetail.core.memory.pools import HostPool
from dovetail.core.worker.connection import Connection
from dovetail.core.worker.expert_moves import ExpertBalancer
from dovetail.core.worker.graphs import Recorder
from dovetail.core.worker.two_batch_overlap import OverlappedForward

if TYPE_CHECKING:
    from dovetail.core.compose import EngineConfig


@dataclass(slots=True)
class RankParts:
    """Built by `load_rank`."""

    engine: EngineConfig
    connection: Connection
    max_len: int
    model: Model
    attention: AttentionBackend
    drafter: Drafter
    processors: Mapping[str, LogitsProcessor]
    groups: tuple[KVGroup, ...]
    host_pools: Mapping[int, HostPool]
    adapters: Adapters | None
    """None = this engine has none."""
    overlapped: OverlappedForward | None
    """Runs the layers of steps without a graph; None = `Model.forward` does."""
    graph_tokens: int
    """Tokens of the largest mixed step that gets a graph, if steps run as graphs; 0 = mixed steps get none."""
    slides: bool = True
    """Whether the KV allocator releases pages behind a window; otherwise sequences keep all pages of window groups."""
    balancer: ExpertBalancer | None = None
    """None = experts do not move."""
    drafts_together: bool = False
    """The drafter runs layers whose experts all lanes share, so all lanes draft in the same steps."""
    recorder: Recorder | None = None
    """Owner of the captured graphs."""

    def close(self) -> None:
        """Free device memory, even if something still refers to this object, and close the connection."""
        self.release()
        self.connection.close()

    def release(self) -> None:
        """Drop everything but the connection."""
        if self.recorder is not None:
            self.recorder.forget()
        self.recorder = self.overlapped = self.adapters = self.model = self.drafter = self.attention = None
        self.processors, self.host_pools, self.balancer = {}, {}, None
