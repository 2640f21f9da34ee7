"""Models that come with the package: `tiny`, and `tiny_draft` with the same tokenizer. Made by examples/train_tiny."""
