"""Contracts and engine. Nothing here imports a plugin."""
