"""FlashInfer's paged attention, available if its package is installed."""
