"""Drafters of the bundled model, trained by examples/train_tiny: `eagle`, `eagle3` and `medusa`."""
