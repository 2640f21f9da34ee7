"""Paged attention in Triton: decode, drafts, prefill and chunks from one kernel."""
