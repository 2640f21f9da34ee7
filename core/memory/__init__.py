"""KV pools, page tables and sizing."""
