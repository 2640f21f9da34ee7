"""8-bit integers for weights and activations."""
