"""Llama and the models built like it."""
