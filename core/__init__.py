"""Contracts, engine and supporting libraries. Nothing here imports a plugin."""
