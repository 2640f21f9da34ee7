"""The root node `engine`: settings that several parts read, so that swapping one part changes nothing else."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.core.compose.config import Config

MOST_RANKS, MOST_SEQUENCES, MOST_TOKENS = 1 << 10, 1 << 16, 1 << 24
"""Limits for mistyped numbers, far above what machines have: memory is allocated for each sequence and token."""


class EngineConfig(Config):
    tp: int = Field(1, ge=1, le=MOST_RANKS)
    """Ranks that share each layer (tensor parallelism)."""
    pp: int = Field(1, ge=1, le=MOST_RANKS)
    """Groups of layers that run one after another on separate ranks (pipeline parallelism)."""
    dp: int = Field(1, ge=1, le=MOST_RANKS)
    """Replicas of the model on this host (data parallelism). Each has tp x pp ranks, a scheduler and a KV cache, in
    separate processes; `router` distributes requests over them. With `ep` > `tp` they are lanes, which share routed
    experts."""
    ep: int | None = Field(None, ge=1)
    """Groups of ranks that have different routed experts (expert parallelism). Up to `tp`, they are groups of each
    replica's `tp` ranks; more are groups of the ranks of all `dp` replicas, which run in lockstep then (lanes). The
    ranks of a group have the same experts, each some of their channels. null: `tp` if `experts` spreads experts,
    else 1."""
    max_len: int | None = Field(None, ge=1)
    """Maximum sequence length in tokens, prompt and output together, never more than the model's limit; null: that
    limit."""
    token_budget: int = Field(2048, ge=1, le=MOST_TOKENS)
    """Maximum number of tokens in one step of a replica, over all sequences."""
    max_seqs: int = Field(64, ge=1, le=MOST_SEQUENCES)
    """Maximum number of sequences in one step of a replica."""
    page_size: int = Field(16, ge=1, le=MOST_TOKENS)
    """Tokens per KV page."""
    kv_dtype: str = "auto"
    """Number format of keys and values in the cache; auto: the same as activations."""
    dtype: str = "auto"
    """Number format of activations; auto: the checkpoint's on CUDA, float32 on CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of all tensors; auto: CUDA if available."""
    first_gpu: int = Field(0, ge=0)
    """GPU of rank 0. The other ranks, then the other replicas, take the following GPUs."""
    depth: int = Field(1, ge=1, le=8)
    """Plans in flight: 1 waits for each step, 2 schedules a step while the previous one runs."""
    late_launch: bool = False
    """Launch a step just before the device would become idle, so that it includes requests that arrive until then;
    needs `depth` 2. First tokens come earlier, by most of a step; a device that is faster than predicted waits. Applies
    to servers and `app=bench`; `LLM` launches at once."""
    drafts: Literal["paying", "always"] = "paying"
    """Which drafts of `spec_decode` are verified. paying: in each step those expected to increase the tokens per
    second, from the cost model (`cost`), measured step times and each row's recent acceptance (without a cost model:
    all). A scheduler may decide for itself."""
    seed: int = Field(0, ge=0)
    """Seed of all random draws, on host and device."""
    memory_fraction: float = Field(0.9, gt=0, le=1)
    """Fraction of a GPU's memory that the engine may use."""
    tune: Literal["auto", "full", "off"] = "auto"
    """Where tuned choices, such as the tiles of matmuls, come from on a GPU. auto: from this machine's cache, then from
    tables of installed packages, then from a prediction. full: start-up first measures what the cache lacks, which
    takes minutes, and adds it to the cache. off: from none of them; the default of each operation runs."""
    tune_table: str | None = None
    """Path of a tuning table for this GPU that precedes the cache
    (`tune.export` of `app=tune` writes one); null: none."""
    cuda_graphs: bool = True
    """Replay steps as CUDA graphs if device, attention and ranks support them; start-up reports if they do not."""
    graph_tokens: int | None = Field(None, ge=0)
    """Tokens in the largest step with prompt tokens that gets a CUDA graph; 0: only decode steps have graphs; null:
    2048 to 4096 (with compressed latents 256 to 4096), the more the smaller a layer is, since larger steps take longer
    than their launches."""
    overlap_tokens: int = Field(0, ge=0)
    """Minimum number of tokens for which a step without a graph runs as two half-batches, so that collectives of one
    overlap with matmuls of the other; 0: never."""
    mask_wait: float = Field(0.01, ge=0)
    """Seconds that a step waits for the grammar mask of a row; a row without its mask yields no token in this step."""
    grammar_cache: int = Field(256 << 20, ge=16 << 20)
    """Bytes of compiled grammars kept for later requests. A grammar that takes more than 1/16 of it is rejected."""
    start_timeout: float | None = Field(900.0, gt=0)
    """Seconds without progress of any rank after which start-up counts as hung and is ended; null: never. It must
    exceed the longest single step of start-up, such as compiling a kernel or reading one tensor."""
    kv_pages: int | None = Field(None, ge=1)
    """Pages in each KV group; null: as many as fit into the measured free memory."""
    record: str | None = None
    """New file to which the engine records requests, plans, results and step times, for `app=replay` and
    `workload=recording`; null: none. With `dp` > 1 each replica adds its number: run.rec becomes run.0.rec, run.1.rec.
    Compressed if zstandard is installed. /dev/null measures what recording costs."""
    record_tokens: bool = False
    """Record token ids, stop strings and grammars too, which are the text of prompts and outputs. false: ids are
    replaced by keyed hashes that only show which prompts share a prefix."""

    @property
    def lanes(self) -> int:
        """Number of replicas that share routed experts; 1 = each replica has all experts."""
        return self.dp if (self.ep or 1) > self.tp else 1
