"""FlashInfer's paged attention, where its package is installed."""
