"""8-bit floats (E4M3) for weights and activations."""
