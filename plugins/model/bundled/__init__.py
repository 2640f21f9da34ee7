"""Models in the package: `tiny`, and `tiny_draft` with the same tokenizer. Trained by examples/train_tiny."""
