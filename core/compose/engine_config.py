"""The root node `engine`: what several parts read, so that swapping one part changes nothing else."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.core.compose.config import Config


class EngineConfig(Config):
    tp: int = Field(1, ge=1)
    """Ranks that share each layer (tensor parallel)."""
    pp: int = Field(1, ge=1)
    """Groups of layers that run one after another on ranks of their own (pipeline parallel)."""
    dp: int = Field(1, ge=1)
    """Replicas of the model on this host (data parallel), each with tp x pp ranks, a scheduler and a KV cache, in
    processes of its own; `router` spreads requests over them."""
    max_len: int | None = Field(None, ge=1)
    """Tokens in the longest sequence, prompt and output; null: the model's own limit. Never more than that."""
    token_budget: int = Field(2048, ge=1)
    """Tokens in one step of a replica, over all sequences."""
    max_seqs: int = Field(64, ge=1)
    """Sequences in one step of a replica."""
    page_size: int = Field(16, ge=1)
    """Tokens in one KV page."""
    kv_dtype: str = "auto"
    """Number format of keys and values in the cache; auto: that of the activations."""
    dtype: str = "auto"
    """Number format of activations; auto: the checkpoint's on CUDA, float32 on CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto: CUDA where there is one."""
    first_gpu: int = Field(0, ge=0)
    """GPU of rank 0; rank r takes the r-th after it, and replicas follow one another."""
    depth: int = Field(1, ge=1, le=8)
    """Plans in flight: 1 waits for each step, 2 schedules one step while another runs."""
    late_launch: bool = False
    """In a server, with a `depth` of 2: launch a step just before the device would have nothing left to do, so that
    requests which come meanwhile are in it. First tokens come sooner, by most of a step; a device that is quicker than
    expected waits. (In `app=bench`, too; `LLM` launches at once.)"""
    drafts: Literal["paying", "always"] = "paying"
    """Steps that verify drafts of `spec_decode`. paying: those in which they are expected to bring more tokens a second
    than they cost, by the cost model (`cost`), the device's own times, and what was accepted lately; without a cost
    model every one. A scheduler may decide by itself."""
    seed: int = Field(0, ge=0)
    """Start of every random draw, on host and device."""
    memory_fraction: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory that the engine may fill."""
    cuda_graphs: bool = True
    """Replay steps as CUDA graphs where device, attention and ranks allow; start-up says where they do not."""
    graph_tokens: int = Field(2048, ge=0)
    """Tokens in the largest step with prompts in it that has a graph; 0: decode steps alone have graphs."""
    overlap_tokens: int = Field(0, ge=0)
    """Tokens from which on a step without a graph runs as two half-batches, so that the ranks' sums of one run under
    the products of the other; 0: no step does."""
    mask_wait: float = Field(0.01, ge=0)
    """Seconds that a step waits for the mask of a row with a grammar; one without it sits the step out."""
    start_timeout: float | None = Field(900.0, gt=0)
    """Seconds without progress of any rank, while the engine starts, after which it hangs and is ended; null: never.
    Compiling kernels and reading one tensor are such steps, so it must outlast the longest."""
    kv_pages: int | None = Field(None, ge=1)
    """Pages in each KV group; null: as many as fit, measured."""
