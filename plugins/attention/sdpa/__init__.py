"""The reference attention backend."""
