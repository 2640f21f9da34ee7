"""Several quantizers in one model."""
