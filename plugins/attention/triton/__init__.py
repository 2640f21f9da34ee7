"""Paged attention in Triton: one kernel for decode, drafts, prefill and chunks."""
