"""Recordings of an engine: what its scheduler was given, and what it and the device answered."""
