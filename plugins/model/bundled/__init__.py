"""Models in the package, trained by examples/train_tiny: `tiny`, `tiny_draft` and `tiny_moe`, with one tokenizer."""
