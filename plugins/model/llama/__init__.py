"""Llama and models with the same architecture."""
