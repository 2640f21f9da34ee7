"""Decoders of the transformers library, with this engine's attention, linear layers and norms."""
